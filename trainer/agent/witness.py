"""What one node has to say about an incident: its ranks' flight records, and its part of the evidence."""

from trainer.agent import recorder
from trainer.agent.local_ranks import LocalRanks
from trainer.agent.recorder import Sockets
from trainer.agent.sampling import Sampler
from trainer.agent.wire import Message, Peer
from trainer.contract.run_dir import AttemptDir


class Witness:
    """Answers the coordinator's questions; each answer is sent whatever could not be had."""

    def __init__(self, attempt: AttemptDir, node: int, sockets: Sockets) -> None:
        self._attempt, self._node, self._sockets = attempt, node, sockets

    async def testify(self, message: Message, ranks: LocalRanks, sampler: Sampler, peer: Peer) -> None:
        """Answer `flight` or `evidence`."""
        match message["say"]:
            case "flight":
                await self._tell_flights(message, ranks, peer)
            case "evidence":
                await self._collect(message, ranks, sampler, peer)

    async def _tell_flights(self, message: Message, ranks: LocalRanks, peer: Peer) -> None:
        generation, asked = ranks.generation, [local.rank for local in ranks.by_rank.values() if not local.ended]
        paths = {rank: self._sockets.path(rank, generation) for rank in asked}
        flights, unanswered = await recorder.flights(paths, message["seconds"])
        told = [flight.to_json() for flight in flights]
        peer.send("flight", generation=generation, serial=message["serial"], flights=told, unanswered=unanswered)

    async def _collect(self, message: Message, ranks: LocalRanks, sampler: Sampler, peer: Peer) -> None:
        peer.send("evidence", generation=ranks.generation, incident=message["incident"], missing={})
