"""The state of one attempt: every part of the coordinator reads it and acts on it."""

import asyncio
import time
from dataclasses import replace

import psutil

from trainer.agent.attempt_state.attempt_progress import AttemptProgress
from trainer.agent.attempt_state.coordinator_timeouts import Timeouts
from trainer.agent.attempt_state.deadline import Bounds
from trainer.agent.attempt_state.generation import AttemptHistory, Generation
from trainer.agent.attempt_state.outbox import Outbox
from trainer.agent.attempt_state.stopping import Stop, Stopping
from trainer.agent.control.own_messages import InboxMessage
from trainer.agent.ladder import node_replacement
from trainer.agent.ladder.in_job_policy import Decision, Situation
from trainer.agent.ladder.rollback import record_skip
from trainer.agent.nodes.roster import Roster
from trainer.agent.watch.command_errors import CommandPast, has_advanced
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.failures.drilled_failures import drill_behind
from trainer.contract.failures.outcome import Failure
from trainer.contract.heartbeat import Heartbeat, Stage
from trainer.contract.launch_token import LaunchToken
from trainer.contract.messages.agents import AskStop, ExpectStop, ProgressReport
from trainer.contract.node_identity import NodeIdentity
from trainer.contract.ranks.progress import StopReason
from trainer.contract.run_dir import AttemptDir, RunDir


class AttemptState:
    """What the coordinator knows of its attempt: the agents, the current generation, its history, a stop request."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, identity: NodeIdentity, events: EventLog,
        token: LaunchToken, started: float, timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        """`started` is when the job began, on the monotonic clock."""
        self.run_dir, self.attempt_dir, self.config, self.identity = run, attempt, config, identity
        self.events, self.token, self.timeouts = events, token, timeouts or Timeouts()
        self.started_at = psutil.Process().create_time()
        """When this job's first process began: an interpreter takes a second until it gets here."""
        self.stage = Stage.JOINING
        self.inbox: asyncio.Queue[tuple[int, InboxMessage]] = asyncio.Queue()
        self.roster = Roster(
            identity.nodes, attempt.number, self.deliver, node_ranks=config.cluster.nodes,
            rejoin=self.timeouts.rejoin,
        )  # fmt: skip
        self.stopping = Stopping(
            kind=identity.kind, started=started, limit=config.cluster.time,
            signal_lead=float(config.cluster.signal_lead), bounds=Bounds(),
        )  # fmt: skip
        self.generation = Generation()
        self.history = AttemptHistory.of(token)
        self.progress = AttemptProgress(attempt.number, identity.job_id, time.time)
        self.outbox = Outbox(attempt, heartbeat=self.timeouts.heartbeat, outcome=self.timeouts.outcome)

    def deliver(self, node: int, message: InboxMessage) -> None:
        """Put a message into the inbox; `node` is -1 for one of the coordinator itself."""
        self.inbox.put_nowait((node, message))

    # -- the current generation --------------------------------------------------------------------------------------

    def begin_generation(self) -> Generation:
        """Number the next generation; its ranks are not started yet."""
        self.generation = Generation(number=self.generation.number + 1, started=time.monotonic())
        self.events.generation, self.stage = self.generation.number, Stage.RUNNING
        return self.generation

    def fail(self, failure: Failure) -> None:
        """Fail the current generation, or the wait for the next one."""
        self.generation.fail(failure, time.monotonic())

    def attributed(self, failure: Failure | None) -> Failure | None:
        """The failure, with the drill of this generation that brought it about, if one did."""
        if failure is None:
            return None
        place = (self.attempt_dir.number, self.generation.number)
        return replace(failure, drill=drill_behind(failure, self.generation.drill, self.config.drill.events, *place))

    def reports(self) -> list[ProgressReport]:
        """The newest report of each training node about the current generation, by node rank."""
        newest = [member.progress for member in self.roster.training_members()]
        return [report for report in newest if report.generation == self.generation.number]

    def merge_reports(self) -> None:
        """Bring the attempt's progress up to date with what the nodes have reported."""
        self.progress.merge(self.reports())
        if self.config.command:
            self.progress.phase = "command"  # the phases of a user's program are not known

    def heartbeat(self) -> Heartbeat:
        """The next heartbeat."""
        return self.progress.beat(generation=self.generation.number, nodes=self.roster.names(), state=self.stage)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def request_stop(self, stop: Stop) -> None:
        """Record why the attempt stops, and ask the ranks to save and stop."""
        self.events.write(EventKind.STOP_REQUESTED, reason=stop.why)
        self.send_stop()

    def send_stop(self) -> bool:
        """Ask the ranks to save and stop; False when no stop was requested."""
        stop = self.stopping.stop
        if stop is not None:
            self.roster.broadcast(AskStop(reason=stop.reason, seconds=self.stopping.left(time.monotonic())))
        return stop is not None

    def announce_stop(self, now: float) -> None:
        """Tell the ranks when a stop is expected, so that they begin no save just before the one that it brings."""
        at = self.stopping.expected_at
        if at is not None and self.generation.number and abs(at - self.generation.stop_announced) > 1.0:
            self.generation.stop_announced = at
            self.roster.broadcast(ExpectStop(seconds=max(0.0, at - now)))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def situation(self, command: CommandPast | None) -> Situation:
        """All that `in_job_policy.decide` depends on; `command` is what is known of a user's own program."""
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
            overdue=self.stopping.overdue(now),
            left=self.stopping.left(now),
            command=command,
            broken=generation.broken,
            restored=generation.restored,
            spares=len(self.roster.spares()),
            home=self.identity.name,
            saves_failing=self.progress.saves_failing,
            drill=generation.drill,
            **self.history.situation_fields(),
        )

    async def record_decision(self, decision: Decision) -> None:
        """Record what ends the current generation; a skipped batch is on disk when this returns, if the disk works."""
        self.history.record_failure(
            self.attributed(decision.failure), decision.mark, self.generation.restored, decision.suspect,
            decision.skip, requested=bool(self.generation.drill),
        )  # fmt: skip
        self.events.write(EventKind.DECISION, action=decision.action.name.lower(), reason=decision.reason)
        if decision.suspect is not None:
            self.events.write(EventKind.CHECKPOINT_SUSPECT, step=decision.suspect, reason=decision.reason)
        if decision.skip is not None:
            await record_skip(decision.skip, self.attempt_dir, self.events)

    def replace_nodes(self, decision: Decision) -> Decision | None:
        """Put spares in the place of lost or blamed nodes; a Decision when the attempt ends instead."""
        self.generation.broken, self.history.new_nodes = None, True
        failure = self.attributed(decision.failure)
        return node_replacement.replace(decision, self.roster, self.events, drill=failure.drill if failure else "")
