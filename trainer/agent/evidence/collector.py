"""One node's answers about an incident: its ranks' flight records, and its part of the evidence."""

from dataclasses import asdict, replace
from typing import Any

from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.evidence import bundle as evidence
from trainer.agent.evidence.bundle import Subject
from trainer.agent.flight import recorder
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.ranks.local_ranks import LocalRank, LocalRanks
from trainer.agent.watch.sampling import Sampler
from trainer.contract.messages.agents import CollectEvidence, EvidenceCollected, FlightRecords, QueryFlights
from trainer.contract.run_dir import AttemptDir

_AT_ONCE = 4
"""Flight records in one message: `flight_record.WIRE` bytes each, and quoted once more."""
_TOLD = 100
"""Parts that could not be collected, as far as they are reported to the coordinator."""


class EvidenceCollector:
    """Answers the coordinator's questions; each answer is sent whatever could not be had."""

    def __init__(self, attempt: AttemptDir, node: int, sockets: FlightSockets) -> None:
        self._attempt, self._node, self._sockets = attempt, node, sockets

    async def collect(
        self, order: QueryFlights | CollectEvidence, ranks: LocalRanks, sampler: Sampler, peer: CoordinatorPeer
    ) -> None:
        """Answer either question."""
        match order:
            case QueryFlights():
                await self._send_flight_records(order, ranks, peer)
            case CollectEvidence():
                await self._send_bundle(order, ranks, sampler, peer)

    async def _send_flight_records(self, query: QueryFlights, ranks: LocalRanks, peer: CoordinatorPeer) -> None:
        generation, asked = ranks.generation, [local.rank for local in ranks.by_rank.values() if not local.ended]
        paths = {rank: self._sockets.path(rank, generation) for rank in asked}
        flights, unanswered = await recorder.flights(paths, query.seconds)
        answer = FlightRecords(generation=generation, serial=query.serial)
        # A few at a time: of a node with many ranks all of them would not fit into one line.
        for first in range(0, len(flights), _AT_ONCE):
            told = tuple(flight.to_json() for flight in flights[first : first + _AT_ONCE])
            peer.send(replace(answer, flights=told))
        peer.send(replace(answer, unanswered=tuple(unanswered), last=True))

    async def _send_bundle(
        self, order: CollectEvidence, ranks: LocalRanks, sampler: Sampler, peer: CoordinatorPeer
    ) -> None:
        folder, generation = self._attempt.incident(order.incident), ranks.generation
        full = ranks.by_rank if order.full is None else order.full
        seen = {one.rank: asdict(one) for one in sampler.samples()}
        subjects = [self._subject(local, generation, seen[rank]) for rank, local in ranks.by_rank.items()]
        found = await evidence.collect(folder, self._node, subjects, full, order.seconds)
        missing = dict(list(found["missing"].items())[:_TOLD])
        peer.send(EvidenceCollected(generation=generation, incident=order.incident, missing=missing))

    def _subject(self, local: LocalRank, generation: int, seen: dict[str, Any]) -> Subject:
        return Subject(
            rank=local.rank,
            pid=None if local.ended else local.pid,
            log=self._attempt.rank_log(local.rank),
            stacks=local.stacks,
            socket=self._sockets.path(local.rank, generation),
            cell={**asdict(local.last), "phase": local.last.phase.name.lower(), "seen": seen},
        )
