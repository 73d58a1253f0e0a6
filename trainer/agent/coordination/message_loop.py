"""The coordinator's message handling: node failures, periodic tasks and messages from agents."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import assert_never

from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.attempt_state.published_files import Reading
from trainer.agent.control.control_server import (
    AgentJoined,
    AgentLost,
    AgentRefused,
    AttemptFenced,
    InboxMessage,
    RequestFound,
    Tick,
)
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.launch_gate import Fence
from trainer.agent.coordination.requests import RequestHandlers, RequestInbox
from trainer.agent.ladder.rank_death import LIMITS
from trainer.agent.processes.background_tasks import HungFileSystem, RepeatedRead
from trainer.agent.watch.hang_limits import calm_seconds
from trainer.protocol.events import EventKind
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import Ping, Unloadable
from trainer.protocol.messages.codec import wire_name
from trainer.protocol.requests import Request


class NodeFailures:
    """Records node failures. A generation fails only if it needs the failed node."""

    def __init__(self, state: RunningAttempt) -> None:
        self._state, self._roster = state, state.roster

    def lost(self, node: int, reason: str) -> None:
        member = self._roster.members.get(node)
        if member is None or member.lost:
            return
        member.lost = reason
        member.peer.drop()
        self._state.events.write(EventKind.AGENT_LOST, node=node, name=member.name, reason=reason)
        if self._roster.is_needed(node):
            # An agent that reported its own failure exits a moment later; that failure is the cause.
            why = member.excluded or reason
            self._fail(FailureKind.AGENT_LOST, node, f"the agent of {member.name} is lost: {why}")

    def foreign(self, node: int, refused: AgentRefused) -> None:
        """Record the refusal of an agent with a different protocol; its node can join only through another agent."""
        reason = f"the agent of {refused.name}: {refused.reason}"
        self._state.events.write(EventKind.DECISION, action="refuse", reason=reason)
        if node in self._roster.members:
            return
        self._roster.give_up(node)
        if self._roster.is_needed(node):
            self._state.fail(Failure(kind=FailureKind.INSTALLATION, reason=reason, node=refused.name))

    def unloadable(self, node: int, message: Unloadable) -> None:
        """Record a fork server that cannot import the workload. If other nodes can, the node is at fault."""
        member = self._roster.members[node]
        member.excluded = f"the workload cannot be imported: {message.exception}: {message.message}"
        if not self._roster.is_needed(node):
            return
        others = [other for other in self._roster.present_members() if other.node != node and other.ready]
        if others:
            reason = f"{member.name}: {member.excluded}, while {others[0].name} can import it"
            self._fail(FailureKind.NODE_SUSPECT, node, reason)
        elif has_meaning(member.excluded, Meaning.NO_PROCESSES):
            self._fail(FailureKind.UNKNOWN, node, f"{member.name}: {member.excluded}; {LIMITS}")
        elif self._state.history.trained and has_meaning(member.excluded, Meaning.INSTALLATION):
            self._fail(FailureKind.STORAGE, node, f"{member.name}: {member.excluded}")
        else:
            self._fail(FailureKind.USER_ERROR, node, member.excluded)

    def agent_failed(self, node: int, reason: str) -> None:
        self._roster.members[node].excluded = reason
        if self._roster.is_needed(node):
            self._fail(FailureKind.UNKNOWN, node, reason)

    def fork_server_died(self, node: int, reason: str) -> None:
        """Record that a fork server died with the ranks it had started; its agent starts another one."""
        name = self._roster.members[node].name
        self._fail(FailureKind.RANK_KILLED, node, f"the fork server of {name} died: {reason}")

    def _fail(self, kind: FailureKind, node: int, reason: str) -> None:
        name = self._roster.members[node].name
        self._state.fail(Failure(kind=kind, reason=reason, node=name, step=self._state.progress.step))


SECONDS = 1.0


class Timers:
    """Two periodic tasks, kept separate because file access may hang for minutes."""

    def __init__(self, state: RunningAttempt, monitor: JobMonitor) -> None:
        self._state, self._monitor = state, monitor
        self._fence = Fence(state.attempt_dir.go, state.token)
        self._fence_check = RepeatedRead(self._fence.is_down, state.attempt_dir.go)
        self._request_inbox = RequestInbox(state.run_dir.requests, state.attempt_dir.number)
        self._tasks: list[asyncio.Task[None]] = []
        # Seconds between pings and between readings of all ranks: the agents' reporting interval in a job this large.
        self._pause, self._ranks_due = calm_seconds(state.config.cluster.all_nodes), 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._ping_agents()), loop.create_task(self._touch_files())]

    def check(self) -> None:
        """Raise the error that ended either task; the coordinator must not continue without them."""
        for task in self._tasks:
            if task.done():
                task.result()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def write_status(self) -> None:
        """Write heartbeat.json, and ranks.json while ranks run."""
        # Merge first, so that a hung file system cannot delay it; failures and the outcome include the step.
        self._state.merge_reports()
        await self._state.outbox.publish_status(self._read_status)

    def _read_status(self) -> Reading:
        beat, now = self._state.heartbeat(), time.monotonic()
        if self._state.stage is not AttemptStage.RUNNING or now < self._ranks_due:
            return beat, None
        self._ranks_due = now + self._pause - SECONDS / 2
        return beat, self._monitor.rank_readings(time.time())

    async def _ping_agents(self) -> None:
        due = 0.0
        while True:
            now = time.monotonic()
            self._state.roster.tick(now)
            if now >= due:
                due = now + self._pause - SECONDS / 2
                self._state.roster.broadcast(Ping())
            self._state.deliver(-1, Tick())
            await asyncio.sleep(SECONDS)

    async def _touch_files(self) -> None:
        while True:
            await self.write_status()
            for request in await self._request_inbox.poll():
                self._state.deliver(-1, RequestFound(request=request))
            with suppress(HungFileSystem):
                if await self._fence_check.result(self._state.timeouts.heartbeat):
                    self._state.deliver(-1, AttemptFenced(reason=self._fence.reason))
            await asyncio.sleep(SECONDS)


_NO_NEWS = (agents.ProgressReport, agents.FlightRecords, agents.RankSaves)
"""Frequent messages that never require a decision."""


class MessageLoop:
    """Handles messages while another part of the coordinator waits."""

    def __init__(self, state: RunningAttempt, monitor: JobMonitor, requests: RequestHandlers, timers: Timers) -> None:
        self._state, self._monitor, self._requests, self._timers = state, monitor, requests, timers
        self._node_failures = NodeFailures(state)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Handle messages until `condition` holds. Return False if it does not within `seconds`."""
        give_up = time.monotonic() + seconds
        while not condition():
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            await self._handle_next(min(left, 1.0))
        return True

    async def wait_for_news(self, seconds: float) -> None:
        """Handle messages until one may require a decision, for at most `seconds`."""
        news, give_up = False, time.monotonic() + seconds
        while not news and (left := give_up - time.monotonic()) > 0:
            news = await self._handle_next(left)

    async def _handle_next(self, seconds: float) -> bool:
        """Handle the next message, if one arrives within `seconds`, and return whether it may require a decision."""
        try:
            node, message = await asyncio.wait_for(self._state.inbox.get(), max(0.0, seconds))
        except TimeoutError:
            return False
        finally:
            self._timers.check()
        try:
            self._handle(node, message)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self._on_agent_lost(node, f"it sent an invalid {wire_name(type(message))!r}: {error!r}")
        return not isinstance(message, _NO_NEWS)

    def _handle(self, node: int, message: InboxMessage) -> None:
        state = self._state
        match message:
            case AgentJoined():
                state.events.write(EventKind.AGENT_JOINED, node=node, name=state.roster.members[node].name)
            case AgentLost():
                self._on_agent_lost(node, message.reason)
            case AgentRefused():
                self._node_failures.foreign(node, message)
            case RequestFound():
                self._answer(message.request)
            case Tick():
                self._check_clock()
            case AttemptFenced():
                state.fail(Failure(kind=FailureKind.UNKNOWN, reason=message.reason, step=state.progress.step))
            case agents.PreflightReport():
                state.roster.record_preflight(node, message, time.time())
            case agents.Ready() | agents.Unready():
                state.roster.members[node].ready = isinstance(message, agents.Ready)
            case agents.Unloadable():
                self._node_failures.unloadable(node, message)
            case agents.AgentFailed():
                self._node_failures.agent_failed(node, message.reason)
            case agents.SignalReceived():
                state.request_stop(state.stopping.on_signal(message.name, time.monotonic()))
            case _ if message.generation == state.generation.number:
                self._handle_generation_message(node, message)

    def _place(self, rank: int) -> str:
        """Return a rank's position in the mesh, or "" for a user program, which builds its own."""
        config = self._state.config
        return "" if config.command else config.parallel.place_words(config.cluster.world_size, rank)

    def _handle_generation_message(self, node: int, message: agents.AboutGeneration) -> None:
        state = self._state
        member, generation = state.roster.members[node], state.generation
        match message:
            case agents.GenerationStore():
                state.roster.broadcast(message)
            case RankEnd():
                place = self._place(message.rank)
                state.note_rank_end(replace(message, node=member.name, at=time.monotonic(), place=place))
            case agents.ForkServerDied():
                self._node_failures.fork_server_died(node, message.reason)
            case agents.GenerationGone():
                member.gone = generation.number
            case agents.ProgressReport():
                state.note_report(node, message)
                self._monitor.receive(node, message)
            case agents.RankSaves():
                state.progress.note_saves(message.rank, message.saves.reason, message.saves.size)
            case agents.FlightRecords() | agents.RankSpeeds():
                self._monitor.receive(node, message)
            case agents.EvidenceCollected():
                self._monitor.receive(node, message)
                self._requests.evidence_collected(node, message)
            case _:
                assert_never(message)

    def _on_agent_lost(self, node: int, reason: str) -> None:
        if self._state.stage is not AttemptStage.ENDED:
            self._node_failures.lost(node, reason)

    def _answer(self, request: Request) -> None:
        answer = self._requests.handle(request, time.monotonic(), time.time())
        if answer is not None:
            self._state.events.write(EventKind.REQUEST_ANSWERED, name=request.name, answer=answer)

    def _check_clock(self) -> None:
        """Run the checks due every second: agent timeouts, requests that can be answered, the end of the job."""
        now, state = time.monotonic(), self._state
        timed_out = state.roster.find_timed_out(now)
        if timed_out is not None:
            self._on_agent_lost(timed_out[0].node, timed_out[1])
        for name, answer in self._requests.finished(now):
            state.events.write(EventKind.REQUEST_ANSWERED, name=name, answer=answer)
        self._requests.ask_due_save(now)
        reports = [member.progress for member in state.roster.present_members()]
        state.stopping.watch(reports, now)
        state.stopping.record_timings(reports)
        state.announce_stop(now)
        if state.stopping.is_due(now):
            state.request_stop(state.stopping.on_deadline(now))
