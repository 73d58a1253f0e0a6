"""The coordinator's inbox, read by one consumer: everything that happens is a message, handled in order."""

import asyncio
import time
from collections.abc import Callable

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.attempt_state.heartbeat import Stage
from trainer.agent.control.tcp_transport import Message
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.node_failures import NodeFailures
from trainer.agent.coordination.request_handlers import RequestHandlers
from trainer.agent.coordination.timers import Timers
from trainer.agent.nodes.preflight import Fault
from trainer.agent.watch.root_cause import RankEnd
from trainer.contract.events import EventKind
from trainer.contract.outcome import Failure, FailureKind
from trainer.contract.requests import Request

_NO_NEWS = frozenset({"progress", "flight", "ping", "saves"})
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
            self._on_agent_lost(node, f"it sent a {message['say']!r} that cannot be read: {error!r}")
        return message["say"] not in _NO_NEWS

    def _handle(self, node: int, message: Message) -> None:
        state = self._state
        match message["say"]:
            case "joined":
                state.events.write(EventKind.AGENT_JOINED, node=node, name=state.roster.members[node].name)
            case "lost":
                self._on_agent_lost(node, message["reason"])
            case "fit":
                faults = [Fault(**fault) for fault in message["faults"]]
                state.roster.record_preflight(node, faults, message, time.time())
            case "ready" | "unready":
                state.roster.members[node].ready = message["say"] == "ready"
            case "unloadable":
                self._node_failures.unloadable(node, message)
            case "fork_server_failed":
                self._node_failures.fork_server_failed(node, message["reason"])
            case "signal":
                state.request_stop(state.stopping.heard(message["name"], time.monotonic()))
            case "request":
                self._answer(message["request"])
            case "tick":
                self._check_clock()
            case "fenced":
                reason = "its launch token was revoked: the controller has fenced this attempt off"
                state.fail(Failure(kind=FailureKind.UNKNOWN, reason=reason, step=state.progress.step))
            case _ if message["generation"] == state.generation.number:
                self._handle_generation_message(node, message)

    def _handle_generation_message(self, node: int, message: Message) -> None:
        """A message about the current generation; those about older ones are ignored."""
        state = self._state
        member, generation = state.roster.members[node], state.generation
        match message["say"]:
            case "store":
                store = {name: message[name] for name in ("host", "port", "key")}
                state.roster.broadcast("store", generation=generation.number, **store)
            case "exit":
                generation.note(RankEnd.from_message(message, member.name, time.monotonic()))
                state.history.trained = state.history.trained or bool(message.get("stepped"))
            case "broken":
                self._node_failures.fork_server_died(node, message["reason"])
            case "gone":
                member.gone = generation.number
            case "progress":
                member.progress = message
                state.history.add_report(message)
                generation.restored = max(generation.restored, int(message.get("restored", 0)))
                self._monitor.receive(node, message)
            case "saves":
                state.progress.note_saves(message["rank"], message["reason"], message["size"])
            case "flight" | "fitness":
                self._monitor.receive(node, message)
            case "evidence":
                self._monitor.receive(node, message)
                self._requests.evidence_collected(node, message)

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
