"""Incidents: events, verdict.json, and the failures they cause."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.attempt_state.published_files import MOST, rank_readings
from trainer.agent.coordination.loss_monitor import LossMonitor
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.recorder import records_of_dead_ranks
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.ladder.rank_death import secondary_order
from trainer.agent.nodes.node_benchmark import NodeBenchmark, usual_speeds
from trainer.agent.processes import background_tasks
from trainer.agent.watch.declare_hang import HangDetector, HangJudgement, HangVerdict, Incident
from trainer.agent.watch.hang_limits import RankSample, after_hangs
from trainer.agent.watch.separate_worlds import describe_separate_worlds, find_separate_worlds
from trainer.agent.watch.stragglers import WorkWindows
from trainer.agent.watch.waiting_ranks import HangKind, StageNeighbours
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.config_sections.watch_config import OBSERVE
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.agents import EvidenceCollected, FlightRecords, ProgressReport, RankSpeeds
from trainer.protocol.rank_readings import RankReadings
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use


def is_needed(ends: Sequence[RankEnd]) -> bool:
    """Return whether no exit is self-explanatory: every bad exit was an abort or reported a lost peer."""
    bad = [end for end in ends if not end.good]
    return bool(bad) and all(secondary_order(end) > 0 for end in bad)


def analyse_dead_ranks(attempt: AttemptDir, generation: int, world: int) -> Finding | None:
    """Return the joint analysis of the flight records that a generation left, or None. Reads the shared file system."""
    found = records_of_dead_ranks(attempt, generation)
    if not found:
        return None
    unanswered = sorted(set(range(world)) - {flight.rank for flight in found})
    return analyse(found, range(world), unanswered)


def desync_judgement(finding: Finding, ends: Sequence[RankEnd]) -> HangJudgement | None:
    """Return the judgement on ranks that called different collectives, or None if the records show no desync."""
    if not finding.kind.startswith("desync"):
        return None
    rank = finding.ranks[0] if finding.ranks else None
    end = next((end for end in ends if end.rank == rank), None)
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=finding.reason,
        culprit=rank,
        node=None if end is None else end.node,
        step=0 if end is None else end.step or 0,
        kind=HangKind.DESYNC,
        waiting=tuple(end.rank for end in ends if end.rank != rank),
    )


_MOST_WAITING = 64
"""Maximum number of waiting ranks in an event; verdict.json lists all of them."""


def build_failure(judgement: HangJudgement, evidence: str) -> Failure:
    """Return the failure caused by the incident. `evidence` is the bundle's path in the run folder."""
    kind = FailureKind.DESYNC if judgement.kind is HangKind.DESYNC else FailureKind.HANG
    return Failure(
        kind=kind,
        reason=judgement.reason,
        rank=judgement.culprit,
        node=judgement.node,
        step=judgement.step,
        evidence=evidence,
        culprits=judgement.culprits[:_MOST_WAITING] if len(judgement.culprits) > 1 else (),
    )


def event_fields(incident: Incident, evidence: str, *, withdrawn: bool) -> dict[str, Any]:
    """Return the event's fields. `withdrawn` means that the ranks moved again while evidence was being collected."""
    judgement = incident.judgement
    return {
        "name": incident.name,
        "kind": str(judgement.kind),
        "rank": judgement.culprit,
        "node": judgement.node,
        "phase": judgement.phase,
        "step": judgement.step,
        "reason": judgement.reason,
        "waiting": list(judgement.waiting)[:_MOST_WAITING],
        "culprits": [asdict(one) for one in judgement.culprits[:_MOST_WAITING]],
        "chain": judgement.chain,
        "evidence": evidence,
        "detected": incident.quiet,
        "withdrawn": withdrawn,
    }


def write_verdict(bundle: Path, incident: Incident, seen: list[RankSample], *, withdrawn: bool) -> None:
    """Write verdict.json: the judgement, every rank's sample, and missing evidence. Raises OSError."""
    bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
    judgement = incident.judgement
    fields = {
        "schema": "orch.incident/1",
        **event_fields(incident, bundle.name, withdrawn=withdrawn),
        "waiting": list(judgement.waiting),
        "witnesses": list(judgement.witnesses),
        "culprits": [asdict(one) for one in judgement.culprits],
        "allowed_seconds": judgement.limit,
        "ranks": [asdict(one) for one in seen],
        "missing": incident.missing,
    }
    shown = in_use().record(dump_line(fields))
    write_durably(bundle / "verdict.json", shown.encode(errors="backslashreplace"))


def _own_work(rank: int) -> tuple[int, ...]:
    """Return a place that no other rank has."""
    return (rank,)


_SETTLED = 0.5
"""Seconds to wait after the first failed exit; by then most others have followed and written flight records."""

_LOOK_EVERY = 5.0
"""Seconds between two searches for separate models, each of which looks at all ranks."""
_PLACED = 3
"""Maximum number of ranks whose mesh positions are included in a reason."""


class JobMonitor:
    """Receives the agents' reports and decides when the current generation must fail."""

    def __init__(self, state: RunningAttempt) -> None:
        self._state, self._config, self._roster, self._events = state, state.config, state.roster, state.events
        self._generation, self._hang_detector = 0, self._new_hang_detector(0)
        self._work_windows: WorkWindows | None = None
        self._losses = LossMonitor(state)
        self._benchmark: NodeBenchmark | None = None
        self._usual_speeds: asyncio.Future[dict[str, float]] | None = None
        self._separate = False  # the nodes were found to train separate models
        self._looked_at = 0.0  # time of the last search for separate models

    def start_generation(self) -> None:
        generation = self._state.generation.number
        self._generation, self._hang_detector = generation, self._new_hang_detector(generation)
        self._losses = LossMonitor(self._state)
        cluster, straggler = self._config.cluster, self._config.detection.straggler
        nodes = [member.name for member in self._roster.training_members() for _ in range(cluster.ranks_per_node)]
        # On GPUs, a program's CPU time includes its waits for the GPU, and so for its peers.
        measured = not (self._config.command and cluster.gpus_per_node)
        known = straggler.on and measured and len(nodes) == cluster.world_size
        alike: Callable[[int], tuple[int, ...]] = partial(self._config.parallel.locate_work, cluster.world_size)
        if self._config.command:  # its mesh is unknown, so its ranks may have different work
            alike = _own_work
        self._work_windows = WorkWindows(cluster.world_size, alike, nodes, straggler) if known else None
        machines = {member.name: member.machine for member in self._roster.training_members()}
        preflight = self._config.detection.preflight
        self._benchmark = NodeBenchmark(nodes, machines, preflight)
        # On a single machine no other node can replace this one, and unrelated load would be blamed on the node.
        if self._usual_speeds is None and not traits(cluster.kind).simulated_nodes:
            self._usual_speeds = background_tasks.start_detached(
                lambda: usual_speeds(self._state.run_dir, self._state.attempt_dir.number, preflight)
            )

    def _new_hang_detector(self, generation: int) -> HangDetector:
        hang = after_hangs(self._config.detection.hang, self._state.history.hangs)
        world = self._config.cluster.world_size
        gpus, pipeline = bool(self._config.cluster.gpus_per_node), self._config.parallel.pipeline
        return HangDetector(
            hang, self._roster, generation, time.monotonic(), world=world, program=bool(self._config.command),
            on_gpus=gpus,
            stages=StageNeighbours(pipeline, world) if self._config.parallel.sends_messages else None,
        )  # fmt: skip

    def receive(self, node: int, message: ProgressReport | RankSpeeds | FlightRecords | EvidenceCollected) -> None:
        """Handle a report, flight records or the end of evidence collection; a malformed message raises an error."""
        match message:
            case ProgressReport():
                self._losses.receive(message)
                self._hang_detector.add_report(node, message, time.monotonic())
                for verdict in self._work_windows.add_report(message.work) if self._work_windows else ():
                    located = replace(verdict, reason=self._with_places(verdict.reason, [verdict.rank]))
                    self._events.write(EventKind.STRAGGLER, **asdict(located))
            case RankSpeeds():
                if self._benchmark is not None:
                    self._benchmark.add(message, time.monotonic())
            case FlightRecords():
                self._hang_detector.add_flight_records(node, message)
            case EvidenceCollected():
                self._hang_detector.evidence_collected(node, message)

    def rank_readings(self, wall: float) -> RankReadings:
        snapshot = self._hang_detector.snapshot
        ratios = {verdict.rank: verdict.ratio for verdict in self._work_windows.slow()} if self._work_windows else {}
        seen = snapshot.worst(time.monotonic(), MOST, ratios)
        return rank_readings(
            seen, world=len(snapshot), time=wall, generation=self._generation, p99=snapshot.p99(), ratios=ratios,
        )  # fmt: skip

    async def check(self) -> Failure | None:
        """Return a failure that no rank can report by itself (hang, desync, slow node, unusable loss), or None."""
        now, slow_node = self._state.generation, self._find_slow_node()
        if self._config.command and not self._separate and time.monotonic() - self._looked_at > _LOOK_EVERY:
            self._looked_at = time.monotonic()
            self._warn_of_separate_worlds()
        if now.first_failure is None:
            return slow_node or await self._find_hang() or await self._losses.check()
        if now.dead_ranks_analysed or now.broken is not None:
            return None
        # Once all ranks have exited, the next decision does not have to wait.
        if len(now.ends) < self._config.cluster.world_size and time.monotonic() - now.first_failure < _SETTLED:
            return None
        now.dead_ranks_analysed = True
        ends = tuple(now.ends.values())
        return await self._find_desync(ends) if is_needed(ends) else None

    def _warn_of_separate_worlds(self) -> None:
        found = find_separate_worlds(self._hang_detector.snapshot.at(time.monotonic()))
        if found is not None:
            self._separate, (rank, nodes) = True, found
            reason = describe_separate_worlds(rank, nodes)
            self._state.progress.separate = reason
            self._events.write(EventKind.PROGRAM_SEPARATE, rank=rank, nodes=list(nodes), reason=reason)

    def _find_slow_node(self) -> Failure | None:
        """Return the failure caused by a slow node, once all measurements have arrived or are overdue."""
        benchmark, usual = self._benchmark, self._usual_speeds
        if benchmark is None or not benchmark.end_trial(time.monotonic()):
            return None
        slow = benchmark.failure(usual.result() if usual is not None and usual.done() else None)
        whose = {} if slow is None else {"name": slow.node}
        late = benchmark.missing()
        why = f"no measurements from {len(late)} rank(s) within detection.preflight.seconds: {late[:8]}" if late else ""
        reason, speeds = why if slow is None else slow.reason, benchmark.median_speeds()
        self._events.write(EventKind.PREFLIGHT, ok=slow is None, reason=reason, speeds=speeds, **whose)
        return slow

    async def _find_hang(self) -> Failure | None:
        """Return the failure of a confirmed hang, once its evidence has been collected."""
        incident = self._hang_detector.look(time.monotonic())
        return None if incident is None else await self._conclude(incident)

    async def _find_desync(self, ends: Sequence[RankEnd]) -> Failure | None:
        """Return the failure of ranks that called different collectives but report only lost peers, or None."""
        world = self._config.cluster.world_size
        try:
            finding = await background_tasks.run_detached(
                lambda: analyse_dead_ranks(self._state.attempt_dir, self._generation, world),
                self._state.timeouts.verdict,
            )
        except TimeoutError:
            return None
        judgement = None if finding is None else desync_judgement(finding, ends)
        if judgement is None:
            return None
        name, now = f"g{self._generation:03d}-{judgement.kind}", time.monotonic()
        return await self._conclude(
            Incident(name=name, judgement=judgement, began=now, quiet=0.0, until=now, waits=set())
        )

    def _with_places(self, reason: str, ranks: Sequence[int]) -> str:
        """Append the mesh positions of the given ranks to the reason."""
        if self._config.command:  # a user program builds its own mesh
            return reason
        parallel, world = self._config.parallel, self._config.cluster.world_size
        places = [f"rank {rank} is {words}" for rank in ranks[:_PLACED] if (words := parallel.place_words(world, rank))]
        return "; ".join([reason, *places])

    async def _conclude(self, found: Incident) -> Failure | None:
        declared = found.judgement
        named = [one.rank for one in declared.culprits] or [rank for rank in (declared.culprit,) if rank is not None]
        incident = replace(found, judgement=replace(declared, reason=self._with_places(declared.reason, named)))
        withdrawn = self._hang_detector.moved_since(incident)
        bundle = self._state.attempt_dir.incident(incident.name)
        seen = self._hang_detector.snapshot.at(incident.began)
        try:
            await background_tasks.run_detached(
                lambda: write_verdict(bundle, incident, seen, withdrawn=withdrawn), self._state.timeouts.verdict
            )
        except (OSError, TimeoutError) as error:  # the disk may also have caused the hang
            sys.stderr.write(f"orch-agent: cannot write {bundle}: {error!r}\n")
        path = str(bundle.relative_to(self._state.run_dir.path))
        observed = self._config.watch.action == OBSERVE
        fields = event_fields(incident, path, withdrawn=withdrawn)
        self._events.write(EventKind.INCIDENT, **fields, **({"observed": True} if observed else {}))
        if withdrawn:
            self._hang_detector.withdraw()
            return None
        if observed:
            self._hang_detector.observe()
            return None
        return build_failure(incident.judgement, path)
