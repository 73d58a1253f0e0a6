"""The coordinator's inbox, read by one consumer: everything that happens is a message, handled in order."""

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.control.own_messages import (
    AgentJoined,
    AgentLost,
    AgentRefused,
    Fenced,
    InboxMessage,
    RequestFound,
    Tick,
)
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.node_failures import NodeFailures
from trainer.agent.coordination.request_handlers import RequestHandlers
from trainer.agent.coordination.timers import Timers
from trainer.agent.watch.root_cause import RankEnd
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import Failure, FailureKind
from trainer.contract.heartbeat import Stage
from trainer.contract.messages import agents
from trainer.contract.messages.codec import name_of
from trainer.contract.requests import Request

_NO_NEWS = (agents.ProgressReport, agents.FlightRecords, agents.RankSaves)
"""Messages that come by the thousand, and call for no decision by themselves."""


class MessageLoop:
    """Handles messages while a part of the coordinator waits for something."""

    def __init__(self, state: AttemptState, monitor: JobMonitor, requests: RequestHandlers, timers: Timers) -> None:
        self._state, self._monitor, self._requests, self._timers = state, monitor, requests, timers
        self._node_failures = NodeFailures(state)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Handle messages until `condition` holds; False when it did not within `seconds`."""
        give_up = time.monotonic() + seconds
        while not condition():
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            await self._handle_next(min(left, 1.0))
        return True

    async def wait_for_news(self, seconds: float) -> None:
        """Handle messages until one calls for a decision, or for `seconds`."""
        news, give_up = False, time.monotonic() + seconds
        while not news and (left := give_up - time.monotonic()) > 0:
            news = await self._handle_next(left)

    async def _handle_next(self, seconds: float) -> bool:
        """Handle the next message, if one comes within `seconds`; whether it may call for a decision."""
        try:
            node, message = await asyncio.wait_for(self._state.inbox.get(), max(0.0, seconds))
        except TimeoutError:
            return False
        finally:
            self._timers.check()
        try:
            self._handle(node, message)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self._on_agent_lost(node, f"it sent a {name_of(type(message))!r} that cannot be read: {error!r}")
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
            case Fenced():
                reason = "its launch token was revoked: the controller has fenced this attempt off"
                state.fail(Failure(kind=FailureKind.UNKNOWN, reason=reason, step=state.progress.step))
            case agents.PreflightReport():
                state.roster.record_preflight(node, message, time.time())
            case agents.Ready() | agents.Unready():
                state.roster.members[node].ready = isinstance(message, agents.Ready)
            case agents.Unloadable():
                self._node_failures.unloadable(node, message)
            case agents.AgentFailed():
                self._node_failures.agent_failed(node, message.reason)
            case agents.SignalReceived():
                state.request_stop(state.stopping.heard(message.name, time.monotonic()))
            case _ if message.generation == state.generation.number:
                self._handle_generation_message(node, message)

    def _place(self, rank: int) -> str:
        """Where a rank stands in the mesh; a program of the user's own makes its own mesh."""
        config = self._state.config
        return "" if config.command else config.parallel.place_words(config.cluster.world_size, rank)

    def _handle_generation_message(self, node: int, message: agents.AboutGeneration) -> None:
        """A message about the current generation; those about older ones are ignored."""
        state = self._state
        member, generation = state.roster.members[node], state.generation
        match message:
            case agents.GenerationStore():
                state.roster.broadcast(message)
            case agents.RankExit():
                generation.note(RankEnd.of(message, member.name, time.monotonic(), self._place(message.rank)))
                state.history.trained = state.history.trained or message.stepped
            case agents.ForkServerDied():
                self._node_failures.fork_server_died(node, message.reason)
            case agents.GenerationGone():
                member.gone = generation.number
            case agents.ProgressReport():
                member.progress = message
                state.history.add_report(message)
                generation.restored = max(generation.restored, message.restored)
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
        if self._state.stage is not Stage.ENDED:
            self._node_failures.lost(node, reason)

    def _answer(self, request: Request) -> None:
        answer = self._requests.handle(request, time.monotonic(), time.time())
        if answer is not None:
            self._state.events.write(EventKind.REQUEST_ANSWERED, name=request.name, answer=answer)

    def _check_clock(self) -> None:
        """Once a second: agents that have timed out, requests that can be answered now, the end of the job."""
        now, state = time.monotonic(), self._state
        timed_out = state.roster.find_timed_out(now)
        if timed_out is not None:
            self._on_agent_lost(timed_out[0].node, timed_out[1])
        for name, answer in self._requests.finished(now):
            state.events.write(EventKind.REQUEST_ANSWERED, name=name, answer=answer)
        reports = [member.progress for member in state.roster.present()]
        state.stopping.watch(reports, now)
        state.stopping.learned(reports)
        state.announce_stop(now)
        if state.stopping.due(now):
            state.request_stop(state.stopping.ending(now))
