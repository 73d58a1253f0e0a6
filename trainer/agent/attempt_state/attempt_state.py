"""State of one attempt: progress, published files and the coordinator's time limits."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from checkpointing.storage.durable import dump_line, number, write_durably
from trainer.agent.attempt_state.generation import AttemptHistory, GenerationState
from trainer.agent.attempt_state.stopping import Bounds, Stop, Stopping
from trainer.agent.control.control_server import InboxMessage
from trainer.agent.ladder import node_replacement
from trainer.agent.ladder.in_job_policy import InJobDecision, Situation, record_skip
from trainer.agent.nodes.roster import Roster
from trainer.agent.processes.background_tasks import run_detached, start_detached
from trainer.agent.watch.command_errors import CommandPast, has_advanced
from trainer.agent.watch.hang_limits import RankSample
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AttemptOutcome, Failure
from trainer.protocol.failures.suspect_checkpoints import drill_behind
from trainer.protocol.heartbeat import LONGEST_TROUBLE, AttemptStage, Heartbeat
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.agents import AskStop, ExpectStop, ProgressReport
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.rank_readings import RankReading, RankReadings
from trainer.protocol.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits in seconds; tests pass shorter ones."""

    join: float = 300.0
    """Wait for all agents to join. srun starts them within seconds, but file systems show new files late."""
    preflight: float = 120.0
    """Wait for all agents to report their preflight."""
    ready: float = 1800.0
    """Wait for all fork servers to start. Importing torch from a busy parallel file system takes minutes at worst."""
    more_nodes: float = 10.0
    """Wait for more nodes to join or pass preflight, once the job has as many as it needs."""
    kill: float = 60.0
    """Wait for the ranks of a failed generation to exit."""
    rejoin: float = 5.0
    """Wait for an agent to rejoin that disconnected before its first message; its connection may have timed out."""
    verdict: float = 5.0
    """Limit for writing a verdict or reading records of dead ranks. A hung file system delays the kill by this much."""
    heartbeat: float = 5.0
    """Limit for writing a heartbeat; the next one is due after a second."""
    outcome: float = 10.0
    """Limit for writing the outcome. The agents must still learn of the end afterwards, and Slurm's KillWait is 30."""


MOST = 64
"""Maximum number of ranks listed: in a larger job, the slow ones and those that have not moved for longest."""


def rank_readings(
    seen: Sequence[RankSample], *, world: int, time: float, generation: int, p99: Mapping[str, float],
    ratios: Mapping[int, float], command: bool = False,
) -> RankReadings:  # fmt: skip
    """Return one reading of the sampled ranks. `ratios` holds the ranks whose own work takes longer than their peers'.
    `command`: the ranks run a user program, whose step, phase and last sign of life are unknown.
    """
    ranks = tuple(
        RankReading(
            rank=one.rank, node=one.node, step=None if command else one.step,
            phase="command" if command else one.phase, age=None if command else round(one.age, 1),
            state=one.state, ratio=ratios.get(one.rank), ended=one.ended,
            moment="" if one.moment is None else str(one.moment),
        )
        for one in sorted(seen, key=lambda one: one.rank)
    )  # fmt: skip
    return RankReadings(generation=generation, world=world, ranks=ranks, time=time, p99=p99)


class AttemptProgress:
    """Merged progress of all nodes; keeps the last known values between generations."""

    def __init__(self, attempt: int, job_id: str, clock: Callable[[], float]) -> None:
        self._attempt, self._job_id, self._clock, self._seq = attempt, job_id, clock, 0
        self.step = self.total = self.saved = 0
        self.loss: float | str | None = None
        self.phase = "init"
        self._saves: dict[int, str] = {}
        self.unsaved_bytes = 0  # of the checkpoint whose save failed last

    @property
    def saves_failing(self) -> str:
        """Return since when and why saves fail; empty while they succeed."""
        return next((self._saves[rank] for rank in sorted(self._saves)), "")

    def note_saves(self, rank: int, trouble: str, size: int) -> None:
        """Record a rank's report that saves of `size` bytes fail.
        Rank 0 commits for all, so its success clears every report.
        """
        self.unsaved_bytes = size or self.unsaved_bytes
        if rank == 0:
            self._saves.clear()
        if trouble:
            self._saves[rank] = trouble[:LONGEST_TROUBLE]

    def merge(self, reports: Sequence[ProgressReport]) -> None:
        """Merge the newest report of every node, node rank 0 first; nodes that have no step yet are ignored."""
        if not reports:
            return
        slowest = min(reports, key=lambda report: report.step)
        self.phase = slowest.phase or self.phase
        self.saved = max(self.saved, *(report.saved for report in reports))
        self.total = max(self.total, *(report.total for report in reports))
        if slowest.step > 0:
            self.step = slowest.step
            self.loss = self.loss if reports[0].loss is None else reports[0].loss

    def beat(self, *, generation: int, nodes: list[str], state: str) -> Heartbeat:
        self._seq += 1
        return Heartbeat(
            seq=self._seq,
            time=self._clock(),
            attempt=self._attempt,
            job_id=self._job_id,
            generation=generation,
            step=self.step,
            total_steps=self.total,
            loss=None if self.loss is None else number(self.loss),
            phase=self.phase,
            saved_step=self.saved,
            nodes=nodes,
            state=state,
            saves_failing=self.saves_failing,
        )


ADDRESS_SECONDS = 60.0
"""Limit for writing the coordinator's address; agents stop looking for it after this time."""

Reading = tuple[Heartbeat, RankReadings | None]
"""Content of heartbeat.json, and of ranks.json if it has changed."""


class Outbox:
    """Bounded file access of the coordinator. Runs in threads that the exit does not wait for; raises no OSError."""

    def __init__(self, attempt: AttemptDir, *, heartbeat: float, outcome: float) -> None:
        """`heartbeat` and `outcome` are the time limits of those writes, in seconds."""
        self._attempt, self._heartbeat_seconds, self._outcome_seconds = attempt, heartbeat, outcome
        self._showing: asyncio.Future[None] | None = None
        self._looking: asyncio.Future[bool] | None = None

    async def be_found(self, fields: Mapping[str, Any]) -> None:
        """Reserve space for the outcome and publish the listening address. Raises OSError; no agent can join then."""

        def write() -> None:
            AttemptOutcome.reserve(self._attempt.outcome)
            write_durably(self._attempt.coordinator, dump_line(dict(fields)).encode())

        await run_detached(write, ADDRESS_SECONDS)

    async def show(self, reading: Callable[[], Reading]) -> None:
        """Replace heartbeat.json and ranks.json; skipped while an earlier write is in progress.
        Two writes never overlap: the older one could finish last and its content would stay.
        """
        give_up = time.monotonic() + self._heartbeat_seconds
        while self._showing is not None and not self._showing.done():
            if (left := give_up - time.monotonic()) <= 0:
                return
            await asyncio.wait([self._showing], timeout=left)
        self._raise_bugs()
        beat, ranks = reading()
        self._showing = start_detached(lambda: self._write(beat, ranks))
        await asyncio.wait([self._showing], timeout=max(0.0, give_up - time.monotonic()))
        self._raise_bugs()

    def _write(self, beat: Heartbeat, ranks: RankReadings | None) -> None:
        """Write the readings to their files; raises OSError."""
        beat.write(self._attempt.heartbeat)
        if ranks is not None:
            ranks.write(self._attempt.ranks)

    def _raise_bugs(self) -> None:
        """Re-raise errors other than OSError.
        A full disk must not end a healthy run; its heartbeat goes stale, which is detected.
        """
        if self._showing is not None and self._showing.done():
            error = self._showing.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def look(self, condition: Callable[[], bool]) -> bool:
        """Return whether `condition` holds; False, without a second call, while the file system does not answer."""
        if self._looking is None:
            self._looking = start_detached(condition)
        await asyncio.wait([self._looking], timeout=self._heartbeat_seconds)
        if not self._looking.done():
            return False
        looked, self._looking = self._looking, None
        return looked.result()

    async def leave(self, outcome: AttemptOutcome) -> None:
        """Write the outcome; if that fails, the agents' exit code still reports how the attempt ended."""
        path = self._attempt.outcome
        try:
            await run_detached(lambda: outcome.write(path), self._outcome_seconds)
        except OSError as error:
            late = f"it takes longer than {self._outcome_seconds:.0f} s"
            why = late if isinstance(error, TimeoutError) else str(error)
            sys.stderr.write(f"orch-agent: cannot write {path}: {why}; it would say: {outcome.reason}\n")


class CoordinatorState:
    """State of an attempt: agents, current generation, history and stop request."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, identity: NodeIdentity, events: EventLog,
        token: LaunchToken, started: float, timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        """`started` is the job's start on the monotonic clock."""
        self.run_dir, self.attempt_dir, self.config, self.identity = run, attempt, config, identity
        self.events, self.token, self.timeouts = events, token, timeouts or Timeouts()
        self.started_at = psutil.Process().create_time()
        """Start time of this job's first process; the interpreter takes about a second to get here."""
        self.stage = AttemptStage.JOINING
        self.inbox: asyncio.Queue[tuple[int, InboxMessage]] = asyncio.Queue()
        self.roster = Roster(
            identity.nodes, attempt.number, self.deliver, node_ranks=config.cluster.nodes,
            rejoin=self.timeouts.rejoin,
        )  # fmt: skip
        self.stopping = Stopping(
            kind=identity.kind, started=started, limit=config.cluster.time,
            signal_lead=float(config.cluster.signal_lead), bounds=Bounds(),
        )  # fmt: skip
        self.generation = GenerationState()
        self.history = AttemptHistory.from_token(token)
        self.progress = AttemptProgress(attempt.number, identity.job_id, time.time)
        self.outbox = Outbox(attempt, heartbeat=self.timeouts.heartbeat, outcome=self.timeouts.outcome)

    def deliver(self, node: int, message: InboxMessage) -> None:
        """Put a message into the inbox; `node` is -1 for the coordinator's own messages."""
        self.inbox.put_nowait((node, message))

    # -- the current generation --------------------------------------------------------------------------------------

    def begin_generation(self) -> GenerationState:
        """Create and number the next generation; its ranks are not started yet."""
        self.generation = GenerationState(number=self.generation.number + 1, started=time.monotonic())
        self.events.generation, self.stage = self.generation.number, AttemptStage.RUNNING
        return self.generation

    def fail(self, failure: Failure) -> None:
        """Fail the current generation, or the wait for the next one."""
        self.generation.fail(failure, time.monotonic())

    def with_drill(self, failure: Failure | None) -> Failure | None:
        """Return the failure, marked with this generation's drill if a drill caused it."""
        if failure is None:
            return None
        place = (self.attempt_dir.number, self.generation.number)
        return replace(failure, drill=drill_behind(failure, self.generation.drill, self.config.drill.events, *place))

    def reports(self) -> list[ProgressReport]:
        """Return each training node's newest report on the current generation, ordered by node rank."""
        newest = [member.progress for member in self.roster.training_members()]
        return [report for report in newest if report.generation == self.generation.number]

    def merge_reports(self) -> None:
        """Update the attempt's progress from the nodes' reports."""
        self.progress.merge(self.reports())
        if self.config.command:
            self.progress.phase = "command"  # phases of a user program are unknown

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat."""
        return self.progress.beat(generation=self.generation.number, nodes=self.roster.names(), state=self.stage)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def request_stop(self, stop: Stop) -> None:
        """Record why the attempt stops, and ask the ranks to save and stop."""
        self.events.write(EventKind.STOP_REQUESTED, reason=stop.why)
        self.send_stop()

    def send_stop(self) -> bool:
        """Ask the ranks to save and stop; returns False if no stop was requested."""
        stop = self.stopping.stop
        if stop is not None:
            self.roster.broadcast(AskStop(reason=stop.reason, seconds=self.stopping.seconds_left(time.monotonic())))
        return stop is not None

    def announce_stop(self, now: float) -> None:
        """Announce the expected time of a stop, so that ranks start no save shortly before the final one."""
        at = self.stopping.earliest_stop
        if at is not None and self.generation.number and abs(at - self.generation.stop_announced) > 1.0:
            self.generation.stop_announced = at
            self.roster.broadcast(ExpectStop(seconds=max(0.0, at - now)))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def situation(self, command: CommandPast | None) -> Situation:
        """Return the input of `in_job_policy.decide`; `command` is the history of a user program."""
        now, generation, stop = time.monotonic(), self.generation, self.stopping.stop
        failed_at = generation.first_failure
        ran_for = (failed_at or now) - generation.started
        if command is not None and has_advanced(command, ran_for):
            self.history.advanced = True
        return Situation(
            world=self.config.cluster.world_size,
            ends=tuple(generation.ends.values()),
            since_failure=0.0 if failed_at is None else now - failed_at,
            since_end=now - max((end.at for end in generation.ends.values()), default=now),
            ran_for=ran_for,
            budget=self.config.recovery.restarts_in_place,
            backoff=(self.config.recovery.backoff, self.config.recovery.backoff_max),
            spike_budget=self.config.detection.spike.roll_backs,
            stopping=StopReason.NONE if stop is None else stop.reason,
            stop_why="" if stop is None else stop.why,
            overdue=self.stopping.is_overdue(now),
            left=self.stopping.seconds_left(now),
            command=command,
            broken=generation.broken,
            restored=generation.restored,
            spares=len(self.roster.spares()),
            home=self.identity.name,
            saves_failing=self.progress.saves_failing,
            drill=generation.drill,
            **self.history.situation_fields(),
        )

    async def record_decision(self, decision: InJobDecision) -> None:
        """Record what ended the current generation; a skipped batch is on disk on return unless the disk fails."""
        self.history.record_failure(
            self.with_drill(decision.failure), decision.mark, self.generation.restored, decision.suspect,
            decision.skip, requested=bool(self.generation.drill),
        )  # fmt: skip
        self.events.write(EventKind.DECISION, action=decision.action.name.lower(), reason=decision.reason)
        if decision.suspect is not None:
            self.events.write(EventKind.CHECKPOINT_SUSPECT, step=decision.suspect, reason=decision.reason)
        if decision.skip is not None:
            await record_skip(decision.skip, self.attempt_dir, self.events)

    def replace_nodes(self, decision: InJobDecision) -> InJobDecision | None:
        """Replace lost or blamed nodes with spares; returns an InJobDecision if the attempt ends instead."""
        self.generation.broken, self.history.new_nodes = None, True
        failure = self.with_drill(decision.failure)
        return node_replacement.replace(decision, self.roster, self.events, drill=failure.drill if failure else "")
