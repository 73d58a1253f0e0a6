"""The coordinator: one per job, inside agent 0. Decides within the attempt, by `rungs`, and leaves its outcome."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from trainer.agent.attempt_state.decision_log import log_decision
from trainer.agent.attempt_state.generation import AttemptHistory, Generation
from trainer.agent.attempt_state.heartbeat import AttemptProgress
from trainer.agent.attempt_state.outbox import Outbox, Reading
from trainer.agent.control.control_server import ControlServer
from trainer.agent.control.tcp_transport import Message
from trainer.agent.coordination.deadline import Bounds
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.launch_gate import Fence
from trainer.agent.coordination.node_failures import NodeFailures
from trainer.agent.coordination.request_handlers import RequestHandlers
from trainer.agent.coordination.request_inbox import RequestInbox, newest_begun_save, newest_own_save
from trainer.agent.coordination.startup import Startup
from trainer.agent.coordination.stopping import Stop, Stopping
from trainer.agent.coordination.teardown import Teardown
from trainer.agent.coordination.timers import Timers
from trainer.agent.fork_server.torchrun_command import free_port
from trainer.agent.ladder import in_job_policy, node_replacement
from trainer.agent.ladder.in_job_policy import Action, Decision, Situation
from trainer.agent.nodes.preflight import Fault
from trainer.agent.nodes.roster import Roster
from trainer.agent.user_command.command_run import CommandRun
from trainer.agent.watch.root_cause import RankEnd
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.launch_token import LaunchToken
from trainer.contract.node_identity import NodeIdentity
from trainer.contract.outcome import AttemptOutcome, Failure, FailureKind
from trainer.contract.progress import StopReason
from trainer.contract.requests import Request
from trainer.contract.run_dir import AttemptDir, RunDir

HANG_UP_SECONDS = 5.0

_NO_DECISION = frozenset({"progress", "flight", "ping"})
_LOOK_SECONDS = 0.25
"""How often a running generation is looked at when nothing is told that calls for a decision."""


class Coordinator:
    """One consumer of one inbox: everything that happens arrives as a message and is handled in order."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, identity: NodeIdentity, events: EventLog,
        token: LaunchToken, started: float, bounds: Bounds | None = None, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`started` is when the job began, on the monotonic clock."""
        self._run, self._attempt, self._config, self._identity = run, attempt, config, identity
        self._events, self._wall, self._started_at = events, wall, wall()
        self._inbox: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._roster = Roster(identity.nodes, attempt.number, self._deliver, node_ranks=config.cluster.nodes)
        self._control_server = ControlServer(secrets.token_hex(32), admit=self._roster.admit, serve=self._roster.serve)
        cluster = config.cluster
        self._stopping = Stopping(
            kind=identity.kind, started=started, limit=cluster.time, signal_lead=float(cluster.signal_lead),
            bounds=bounds or Bounds(),
        )  # fmt: skip
        self._progress = AttemptProgress(attempt.number, identity.job_id, wall)
        self._request_inbox = RequestInbox(run.requests, attempt.number, self._deliver)
        self._fence = Fence(attempt.go, token)
        self._now, self._outbox = Generation(), Outbox(attempt)
        self._timers = Timers(self._tick, self._touch_files)
        self._state, self._host = "joining", ""
        self._history, self._due = AttemptHistory.of(token), 0.0
        self._monitor = JobMonitor(run, attempt, config, events, self._roster)
        self._restored, self._undecided = 0, False
        self._command = CommandRun(run, attempt, config, events, self._progress)
        self._node_failures = NodeFailures(self._roster, events, self._progress, lambda: self._now)
        self._startup = Startup(
            config.recovery.preflight, self._roster, self._stopping, self._until, lambda: self._now,
            command=bool(config.command), events=events,
        )  # fmt: skip
        self._teardown = Teardown(self._roster, self._stopping, self._until, events)
        self._request_handlers = RequestHandlers(
            config, attempt=attempt, stopping=self._stopping, request_inbox=self._request_inbox,
            ask_stop=self._ask_stop, roster=self._roster, wall=wall,
        )  # fmt: skip

    async def open(self, host: str) -> dict[str, Any]:
        """Listen, and tell the other agents where; returns what stands in coordinator.json."""
        self._host = host
        port = await self._control_server.open(host)
        found = {"schema": "orch.coordinator/1", "host": host, "port": port, "token": self._control_server.token}
        found["job_id"] = self._identity.job_id
        await self._outbox.be_found(found)
        return found

    async def run(self) -> int:
        """Lead the attempt to its end; returns the exit code of every agent."""
        self._timers.start()
        try:
            decision = await self._start_up()
            while decision is None:
                decision = await self._generation()
            return await self._end(decision)
        finally:
            self._timers.stop()
            await self._control_server.close()

    # -- what arrives ------------------------------------------------------------------------------------------------

    def _deliver(self, node: int, message: Message) -> None:
        self._inbox.put_nowait((node, message))

    async def _handle_next(self, patience: float) -> None:
        """Handle the next message, if one comes within `patience` seconds."""
        try:
            node, message = await asyncio.wait_for(self._inbox.get(), max(0.0, patience))
        except TimeoutError:
            return
        finally:
            self._timers.check()
        # Reports of progress come by the thousand, and decide nothing by themselves.
        self._undecided = self._undecided or message["say"] not in _NO_DECISION
        try:
            self._handle(node, message)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self._on_agent_lost(node, f"it sent a {message['say']!r} that cannot be read: {error!r}")

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Absorb messages until `condition` holds; False when it did not within `seconds`."""
        give_up = time.monotonic() + seconds
        while not condition():
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            await self._handle_next(min(left, 1.0))
        return True

    def _handle(self, node: int, message: Message) -> None:
        match message["say"]:
            case "joined":
                name = self._roster.members[node].name
                self._events.write(EventKind.AGENT_JOINED, node=node, name=name)
            case "lost":
                self._on_agent_lost(node, message["reason"])
            case "fit":
                self._roster.record_preflight(
                    node, [Fault(**fault) for fault in message["faults"]], message, self._wall()
                )
            case "ready" | "unready":
                self._roster.members[node].ready = message["say"] == "ready"
            case "unloadable":
                self._node_failures.unloadable(node, message)
            case "barren":
                self._node_failures.fork_server_failed(node, message["reason"])
            case "signal":
                self._ask_stop(self._stopping.heard(message["name"], time.monotonic()))
            case "request":
                self._answer(message["request"])
            case "tick":
                self._check_clock()
            case "fenced":
                reason = "its launch token was revoked: the controller has fenced this attempt off"
                self._node_failures.fail(Failure(kind=FailureKind.UNKNOWN, reason=reason, step=self._progress.step))
            case _ if message["generation"] == self._now.number:
                self._handle_generation_message(node, message)

    def _handle_generation_message(self, node: int, message: Message) -> None:
        """A message about the generation that runs; older ones are echoes."""
        match message["say"]:
            case "store":
                store = {name: message[name] for name in ("host", "port", "key")}
                self._roster.broadcast("store", generation=self._now.number, **store)
            case "exit":
                self._record_rank_end(node, message)
            case "broken":
                self._node_failures.fork_server_died(node, message["reason"])
            case "gone":
                self._roster.members[node].gone = self._now.number
            case "progress":
                self._roster.members[node].progress = message
                self._history.add_report(message)
                self._restored = max(self._restored, int(message.get("restored", 0)))
                self._monitor.receive(node, message)
            case "flight" | "fitness":
                self._monitor.receive(node, message)
            case "evidence":
                self._monitor.receive(node, message)
                self._request_handlers.evidence_collected(node, message)

    def _record_rank_end(self, node: int, message: Message) -> None:
        self._now.note(RankEnd.from_message(message, self._roster.members[node].name, time.monotonic()))
        self._history.trained = self._history.trained or bool(message.get("stepped"))

    def _on_agent_lost(self, node: int, reason: str) -> None:
        if self._state != "ended":
            self._node_failures.lost(node, reason)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _ask_stop(self, stop: Stop) -> None:
        self._events.write(EventKind.STOP_REQUESTED, reason=f"{stop.reason.name.lower()}: {stop.why}")
        self._send_stop()

    def _send_stop(self) -> None:
        """Ranks that start when a stop, or a save, was asked for hear of it, and have their time like the others."""
        if (stop := self._stopping.stop) is not None:
            self._roster.broadcast("ask", reason=int(stop.reason), seconds=self._stopping.left(time.monotonic()))
        else:
            self._request_handlers.ask_again()

    def _answer(self, request: Request) -> None:
        begun = newest_begun_save(self._reports(), self._progress.total)
        answer = self._request_handlers.to(request, time.monotonic(), begun, self._now.number)
        if answer is not None:
            self._events.write(EventKind.REQUEST_ANSWERED, name=request.name, answer=answer)

    def _check_clock(self) -> None:
        """Once a second: silence, saves that were asked for, the end of the job."""
        now = time.monotonic()
        find_timed_out = self._roster.find_timed_out(now)
        if find_timed_out is not None:
            self._on_agent_lost(find_timed_out[0].node, find_timed_out[1])
        for name, answer in self._request_handlers.late(now, newest_own_save(self._reports(), self._restored)):
            self._events.write(EventKind.REQUEST_ANSWERED, name=name, answer=answer)
        reports = [member.progress for member in self._roster.present()]
        self._stopping.watch(reports, now)
        self._stopping.learned(reports)
        self._expect_stop(now)
        if self._stopping.due(now):
            self._ask_stop(self._stopping.ending(now))

    def _expect_stop(self, now: float) -> None:
        """Tell the ranks when a stop will come, so that no save is begun just before the one that it brings."""
        at = self._stopping.expected_at
        if at is not None and self._now.number and abs(at - self._due) > 1.0:
            self._due = at
            self._roster.broadcast("due", seconds=max(0.0, at - now))

    def _tick(self) -> None:
        """What agents must hear and what the clock must bring about, however slow the file system is."""
        self._roster.tick(time.monotonic())
        self._roster.broadcast("ping")
        self._deliver(-1, {"say": "tick"})

    async def _touch_files(self) -> None:
        await self._write_heartbeat()
        await self._request_inbox.poll()
        if await self._outbox.look(self._fence.is_down):
            self._deliver(-1, {"say": "fenced"})

    async def _write_heartbeat(self) -> None:
        self._progress.merge(self._reports())
        if self._config.command:
            self._progress.phase = "command"  # what a user's program does is not known
        await self._outbox.show(self._reading)

    def _reports(self) -> list[dict[str, Any]]:
        """The newest ones of the generation that runs, by seat."""
        newest = [member.progress for member in self._roster.training_members()]
        return [report for report in newest if report.get("generation") == self._now.number]

    def _reading(self) -> Reading:
        """What heartbeat.json and ranks.json say now."""
        beat = self._progress.beat(generation=self._now.number, nodes=self._roster.names(), state=self._state)
        return beat, self._monitor.ranks_file(self._wall()) if self._state == "running" else None

    # -- the attempt -------------------------------------------------------------------------------------------------

    async def _start_up(self) -> Decision | None:
        """Wait until every node has joined, is examined and has a fork server; a Decision when that fails."""
        decision = await self._startup.wait_joined()
        if decision is not None:
            return decision
        self._events.write(
            EventKind.ATTEMPT_STARTED, job_id=self._identity.job_id, nodes=self._roster.names(),
            world=self._config.cluster.world_size,
        )  # fmt: skip
        decision = await self._startup.wait_preflight()
        if decision is not None:
            return decision
        self._roster.assign_node_ranks()
        return await self._get_ready()

    async def _get_ready(self) -> Decision | None:
        self._state = "warming"
        decision = await self._startup.wait_ready()
        # Nodes may be lost while the others warm up, too.
        while decision is not None and node_replacement.can_replace(decision, self._roster):
            if (ended := self._replace(decision)) is not None:
                return ended
            decision = await self._startup.wait_ready()
        return decision

    def _replace(self, decision: Decision) -> Decision | None:
        self._now.broken, self._history.new_nodes = None, True
        return node_replacement.replace(decision, self._roster, self._events)

    async def _generation(self) -> Decision | None:
        """Run one generation; a Decision when the attempt ends with it, None when another follows."""
        self._now = Generation(number=self._now.number + 1, started=time.monotonic())
        self._state, self._events.generation = "running", self._now.number
        world, nodes = self._config.cluster.world_size, self._config.cluster.nodes
        await self._command.start_generation(self._now.number)
        self._events.write(EventKind.GENERATION_STARTED, world=world, nodes=nodes)
        master = [self._host, free_port(self._host)] if self._config.command else None
        skip = [each.position for each in self._history.skipped]
        suspects, fit = self._history.suspects, self._history.new_nodes
        self._roster.start_generation(generation=self._now.number, master=master, suspects=suspects, skip=skip, fit=fit)
        self._due, self._restored, self._history.new_nodes = 0.0, 0, False
        self._monitor.start_generation(self._now.number)
        self._stopping.again(self._now.started)
        self._send_stop()
        while (decision := in_job_policy.decide(self._situation())).action is Action.WAIT:
            # Short only while something is about to be decided by the clock.
            await self._listen(0.05 if self._now.first_failure or self._stopping.stop else _LOOK_SECONDS)
            await self._watch()
        self._history.record_failure(decision.failure, decision.mark, self._restored, decision.suspect, decision.skip)
        await log_decision(decision, self._attempt, self._events)
        self._state = "clearing"
        cleared = await self._teardown.kill_generation(self._now.number, decision)
        await self._command.end_generation(decision, self._now, cleared=cleared)
        await self._write_heartbeat()
        failure = decision.failure.to_json() if decision.failure else None
        step = self._progress.step if self._progress.step or not self._config.command else None  # not known
        self._events.write(EventKind.GENERATION_ENDED, reason=decision.reason, step=step, failure=failure)
        if decision.action not in (Action.RESTART, Action.ROLL_BACK, Action.REPLACE):
            return decision
        if not cleared:
            decision = self._teardown.exclude_stuck_nodes(self._now.number, decision)
        if decision.action is Action.END:
            return decision
        if decision.action is Action.REPLACE:
            return self._replace(decision) or await self._get_ready()
        if self._now.broken is decision.failure:  # mended with what is decided; what came while ranks died is not
            self._now.broken = None
        self._history.restarts += decision.action is Action.RESTART
        self._history.again = self._history.again or self._stopping.stop is not None
        return await self._get_ready()

    async def _listen(self, seconds: float) -> None:
        """Absorb messages until one calls for a decision, or for so long."""
        self._undecided, give_up = False, time.monotonic() + seconds
        while not self._undecided and (left := give_up - time.monotonic()) > 0:
            await self._handle_next(left)

    async def _watch(self) -> None:
        """A hang that is certain, its evidence kept, breaks the generation; so do ranks that had gone apart."""
        await self._command.check(self._now)
        found = await self._monitor.check(self._now)
        if found is not None:
            self._node_failures.fail(found)

    def _situation(self) -> Situation:
        now, generation, stop = time.monotonic(), self._now, self._stopping.stop
        failed_at = generation.first_failure
        return Situation(
            world=self._config.cluster.world_size,
            ends=tuple(generation.ends.values()),
            since_failure=0.0 if failed_at is None else now - failed_at,
            since_end=now - max((end.at for end in generation.ends.values()), default=now),
            ran_for=(failed_at or now) - generation.started,
            budget=self._config.recovery.restarts_in_place,
            spike_budget=self._config.recovery.spike.roll_backs,
            stopping=StopReason.NONE if stop is None else stop.reason,
            overdue=self._stopping.overdue(now),
            left=self._stopping.left(now),
            command=self._command.past(),
            broken=generation.broken,
            restored=self._restored,
            spares=len(self._roster.spares()),
            home=self._identity.name,
            **self._history.situation_fields(),
        )

    async def _end(self, decision: Decision) -> int:
        """Leave the last word, then let every agent go with the same exit code."""
        stop = self._stopping.stop
        code, result, reason = in_job_policy.final_outcome(decision, None if stop is None else stop.reason)
        outcome = AttemptOutcome(
            attempt=self._attempt.number, job_id=self._identity.job_id, result=result, reason=reason,
            exit_code=int(code), step=self._progress.step, generations=self._now.number, started_at=self._started_at,
            ended_at=self._wall(), failure=decision.failure,
        )  # fmt: skip
        await self._outbox.leave(outcome)
        self._events.write(EventKind.ATTEMPT_ENDED, result=str(result), reason=reason)
        self._state = "ended"
        await self._write_heartbeat()
        self._roster.broadcast("end", code=int(code), reason=reason)
        await self._roster.wait_until_disconnected(HANG_UP_SECONDS)
        return int(code)
