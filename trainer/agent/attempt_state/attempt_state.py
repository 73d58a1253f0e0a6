"""State of one attempt and its owner: the current generation, the history of earlier generations, and decisions."""

import asyncio
import time
from dataclasses import dataclass, field, replace

from trainer.agent.attempt_state.published_files import AttemptProgress, Outbox
from trainer.agent.attempt_state.stopping import Bounds, Stop, Stopping
from trainer.agent.control.control_server import InboxMessage
from trainer.agent.ladder import spare_nodes
from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.ladder.command_failures import CommandPast, has_advanced
from trainer.agent.ladder.in_job_policy import FIXED_BY_RESTART, Situation, record_skip
from trainer.agent.nodes.roster import Roster
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.failures.suspect_checkpoints import HARMLESS, drill_behind
from trainer.protocol.heartbeat import AttemptStage, Heartbeat
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.agents import AskStop, ExpectStop, ProgressReport, StartGeneration
from trainer.protocol.node_identity import NodeIdentity, process_start_time
from trainer.protocol.rank_progress.progress import Phase, StopReason
from trainer.protocol.restore_test import is_restore_program
from trainer.protocol.run_dir import AttemptDir, RunDir


@dataclass(kw_only=True)
class GenerationState:
    """State of one generation; times are in seconds on the coordinator's monotonic clock."""

    number: int = 0
    started: float = 0.0
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: float | None = None
    broken: Failure | None = None  # failure other than a rank's exit
    dead_ranks_analysed: bool = False  # the flight records of its dead ranks have been read
    restored: int = 0  # step of the checkpoint it started from; 0 if none
    stop_announced: float = 0.0  # announced stop time, on the coordinator's clock
    drill: str = ""  # kind of the newest requested drill that ends this generation
    finite_until: float | None = None  # time of the last finite loss, if the loss has become unusable; 0: none

    def note(self, end: RankEnd) -> None:
        self.ends[end.rank] = end
        if not end.good and self.first_failure is None:
            self.first_failure = end.at

    def note_drill(self, kind: str) -> None:
        """Record a requested drill of this kind."""
        self.drill = self.drill if kind in HARMLESS else kind

    def fail(self, failure: Failure, now: float) -> None:
        """Record a failure other than a rank's exit. The first one is kept, unless no restart fixes the later one."""
        # Ranks waiting for a dead peer do not move either; the peer's exit is better evidence.
        if failure.kind is FailureKind.HANG and any(not end.good for end in self.ends.values()):
            return
        worse = (
            failure.kind not in FIXED_BY_RESTART and self.broken is not None and self.broken.kind in FIXED_BY_RESTART
        )
        if self.broken is None or worse or failure.kind is FailureKind.AGENT_LOST:
            self.broken = failure
        if self.first_failure is None:
            self.first_failure = now


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits in seconds; tests pass shorter limits."""

    join: float = 300.0
    """Wait for all agents to join. srun starts them within seconds, but file systems may show new files late."""
    preflight: float = 120.0
    """Wait for all agents to report their preflight."""
    ready: float = 1800.0
    """Wait for all fork servers to start. Importing torch from a busy parallel file system can take minutes."""
    more_nodes: float = 10.0
    """Wait for more nodes to join or pass preflight, once the job has as many as it needs."""
    kill: float = 60.0
    """Wait for the ranks of a failed generation to exit."""
    rejoin: float = 5.0
    """Wait for an agent to return if it disconnected before its first message, for example after a timeout."""
    verdict: float = 5.0
    """Limit for writing a verdict or reading records of dead ranks. A hung file system delays the kill by this long."""
    heartbeat: float = 5.0
    """Limit for writing a heartbeat; the next one is due a second later."""
    outcome: float = 10.0
    """Limit for writing the outcome. The agents must be notified afterwards, within Slurm's KillWait of 30 seconds."""


class RunningAttempt:
    """Owner of an attempt's state: agents, current generation, history, stop request. Only its methods change it."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, identity: NodeIdentity, events: EventLog,
        token: LaunchToken, started: float, timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        """`started` is the job's start on the monotonic clock."""
        self.run_dir, self.attempt_dir, self.config, self.identity = run, attempt, config, identity
        self.events, self.token, self.timeouts = events, token, timeouts or Timeouts()
        self.started_at = process_start_time()
        """Start time of this job's first process; the interpreter needs about a second to start."""
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

    def enter(self, stage: AttemptStage) -> None:
        self.stage = stage

    def start_ranks(
        self,
        master: tuple[str, int] | None,
        resume: str = "",
        states: tuple[str, ...] = (),
        *,
        is_earlier: bool = False,
    ) -> None:
        """Order every training node to start its ranks.
        For a user's own command, `master` is the rendezvous address, `resume` the path of a checkpoint, `states` has
        the digests of each rank's parameters in it, and `is_earlier` says that it is not of this run.
        """
        history = self.history
        start = StartGeneration(
            generation=self.generation.number, fit=history.new_nodes, suspects=tuple(history.suspects),
            skip=tuple(each.position for each in history.skipped), master=master,
            resume=resume, states=states, is_earlier=is_earlier,
        )  # fmt: skip
        self.roster.start_generation(start)
        history.new_nodes = False

    def note_rank_end(self, end: RankEnd) -> None:
        self.generation.note(end)
        self.history.trained = self.history.trained or end.stepped

    def note_report(self, node: int, report: ProgressReport) -> None:
        """Record a node's progress in the current generation."""
        self.roster.members[node].progress = report
        self.history.add_report(report)
        self.generation.restored = max(self.generation.restored, report.restored)

    def restart_in_place(self, decision: Decision) -> None:
        """Prepare the next generation on the same nodes."""
        # The decision covers only the failure that prompted it, not one that occurred while ranks were being killed.
        if self.generation.broken is decision.failure:
            self.generation.broken = None
        self.history.restarts += decision.action is Action.RESTART and not self.generation.drill
        self.history.restarted_to_save = self.history.restarted_to_save or self.stopping.stop is not None

    def fail(self, failure: Failure) -> None:
        """Fail the current generation, or the wait for the next one."""
        self.generation.fail(failure, time.monotonic())

    def with_drill(self, failure: Failure | None) -> Failure | None:
        """Return the failure, marked with this generation's drill if that drill caused it."""
        if failure is None:
            return None
        place = (self.attempt_dir.number, self.generation.number)
        return replace(failure, drill=drill_behind(failure, self.generation.drill, self.config.drill.events, *place))

    def reports(self) -> list[ProgressReport]:
        """Return each training node's newest report on the current generation, ordered by node rank."""
        newest = [member.progress for member in self.roster.training_members()]
        return [report for report in newest if report.generation == self.generation.number]

    def shortfall(self) -> str:
        """Return how many steps a user's program still has to train, by its own count, or "" if none is known."""
        command = self.config.command
        reports = [report for report in self.reports() if report.phase != Phase.DONE.name.lower()]
        step, total = min(((one.step, one.total) for one in reports), default=(0, 0))
        return f"step {step} of {total}" if command and not is_restore_program(command) and 0 < step < total else ""

    def merge_reports(self) -> None:
        """Update the attempt's progress from the nodes' reports."""
        reports, command = self.reports(), bool(self.config.command)
        self.progress.merge(reports, steps=not (command and self.config.progress.pattern))
        if command and not any(report.stepped for report in reports):
            self.progress.phase = "command"  # phases of a program that is not instrumented are unknown

    def heartbeat(self) -> Heartbeat:
        nodes, waits = self.roster.names(), self.roster.describe_waits() or self.progress.separate
        return self.progress.beat(generation=self.generation.number, nodes=nodes, state=self.stage, waits=waits)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def request_stop(self, stop: Stop) -> None:
        """Record why the attempt stops, and ask the ranks to save and stop."""
        self.events.write(EventKind.STOP_REQUESTED, reason=stop.why)
        self.send_stop()

    def send_stop(self) -> bool:
        """Ask the ranks to save and stop. Return False if no stop was requested."""
        stop = self.stopping.stop
        if stop is not None:
            self.roster.broadcast(AskStop(reason=stop.reason, seconds=self.stopping.seconds_left(time.monotonic())))
        return stop is not None

    def announce_stop(self, now: float) -> None:
        """Announce the expected time of a stop, so that ranks do not start another save just before the final one."""
        at = self.stopping.earliest_stop
        if at is not None and self.generation.number and abs(at - self.generation.stop_announced) > 1.0:
            self.generation.stop_announced = at
            self.roster.broadcast(ExpectStop(seconds=max(0.0, at - now)))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def situation(self, command: CommandPast | None) -> Situation:
        """Return the input for `in_job_policy.decide`; `command` is what is known about a user program."""
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
            shortfall=self.shortfall(),
            history=self.history,
        )

    async def record_decision(self, decision: Decision) -> None:
        """Record what ended the current generation. On return, a skipped batch is on disk unless the disk failed."""
        self.history.record_failure(
            self.with_drill(decision.failure), decision.mark, self.generation.restored, decision.suspect,
            decision.skip, requested=bool(self.generation.drill),
        )  # fmt: skip
        self.events.write(EventKind.DECISION, action=decision.action.name.lower(), reason=decision.reason)
        if decision.suspect is not None:
            self.events.write(EventKind.CHECKPOINT_SUSPECT, step=decision.suspect, reason=decision.reason)
        if decision.skip is not None:
            await record_skip(decision.skip, self.attempt_dir, self.events)

    def replace_nodes(self, decision: Decision) -> Decision | None:
        """Replace lost or blamed nodes with spares. Return a Decision if the attempt ends instead."""
        self.generation.broken, self.history.new_nodes = None, True
        failure = self.with_drill(decision.failure)
        return spare_nodes.replace(decision, self.roster, self.events, drill=failure.drill if failure else "")
