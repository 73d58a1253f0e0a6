"""The coordinator's inbox: messages, requests, timers and the launch gate."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from trainer.agent.attempt_state.attempt_state import CoordinatorState, Reading
from trainer.agent.control.control_server import (
    AgentJoined,
    AgentLost,
    AgentRefused,
    AttemptFenced,
    InboxMessage,
    RequestFound,
    Tick,
)
from trainer.agent.coordination.drill_orders import DrillOrders
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.node_failures import NodeFailures
from trainer.agent.processes.background_tasks import HungFileSystem, RepeatedRead
from trainer.agent.watch.hang_detector import calm_seconds
from trainer.agent.watch.root_cause import RankEnd
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.launch_token import LaunchToken, was_revoked
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import AskStop, CollectEvidence, EvidenceCollected, Ping, ProgressReport
from trainer.protocol.messages.codec import wire_name
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.requests import REFUSED, Request, RequestKind, pending

READ_SECONDS = 2.0
"""Maximum delay in seconds that reading requests may cause to the coordinator's other files."""


class RequestInbox:
    """Reader of the request folder; returns every request once."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._seen: set[str] = set()
        self._requests = RepeatedRead(lambda: pending(folder, attempt, self._seen), folder)

    async def poll(self) -> list[Request]:
        """Return the new requests; empty while the folder cannot be read."""
        try:
            found = await self._requests.result(READ_SECONDS)
        except OSError:
            return []
        self._seen.update(request.name for request in found)
        return found


class LaunchRefused(Exception):
    """Raised if this process must not train; the message gives the reason."""


async def wait_for_go(path: Path, identity: NodeIdentity, attempt: int, *, seconds: float | None = None) -> LaunchToken:
    """Wait for the attempt's launch token and return it.
    Raises Refused if it belongs to another job or does not arrive in time, and HungFileSystem if its file system does
    not answer.
    """
    # Slurm restarted this job; it has already trained under the same token.
    if identity.restarts > 0:
        raise LaunchRefused(
            f"Slurm has restarted job {identity.job_id} ({identity.restarts} times); orch starts new jobs instead"
        )
    patience = seconds if seconds is not None else traits(identity.kind).go_seconds
    token = await _read_late(path, patience)
    if token.attempt != attempt:
        raise LaunchRefused(f"{path} is for attempt {token.attempt}, this is attempt {attempt}")
    if token.job_id != identity.job_id:
        raise LaunchRefused(f"{path} is for job {token.job_id}, this is job {identity.job_id}")
    return token


async def _read_late(path: Path, patience: float) -> LaunchToken:
    token, pause = RepeatedRead(lambda: LaunchToken.read(path), path), 0.02
    give_up = time.monotonic() + patience
    while True:
        try:
            return await token.result(give_up - time.monotonic())
        except FileNotFoundError:
            problem = "is not there"
        except HungFileSystem as error:
            raise HungFileSystem(path, patience) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"cannot be read: {error}"
        if time.monotonic() + pause >= give_up:
            raise LaunchRefused(f"{path} {problem} after {patience:.0f} s")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.25)


class Fence:
    """Repeated check of GO: a missing token, or another job's, means that this attempt must end."""

    def __init__(self, path: Path, token: LaunchToken) -> None:
        self._path, self._token, self._misses = path, token, 0
        self.reason = ""  # why it is down

    def is_down(self) -> bool:
        """Return whether two consecutive reads found no matching token. An unresponsive file system proves nothing."""
        try:
            held = self._token.is_same(LaunchToken.read(self._path))
        except FileNotFoundError:
            held = False
            revoked = "its launch token was revoked: the controller has fenced this attempt off"
            deleted = f"its launch token {self._path} is missing: deleted, but not by orch, and so no save is safe"
            self.reason = revoked if was_revoked(self._path) else deleted
        except (OSError, ValueError, TypeError, KeyError):
            return False
        else:
            self.reason = f"its launch token {self._path} is that of another job"
        self._misses = 0 if held else self._misses + 1
        return self._misses >= 2


SECONDS = 1.0


class Timers:
    """Two periodic tasks, kept separate because file access may hang for minutes."""

    def __init__(self, state: CoordinatorState, monitor: JobMonitor) -> None:
        self._state, self._monitor = state, monitor
        self._fence = Fence(state.attempt_dir.go, state.token)
        self._request_inbox = RequestInbox(state.run_dir.requests, state.attempt_dir.number)
        self._tasks: list[asyncio.Task[None]] = []
        # Seconds between two pings and between two readings of all ranks, as agents of this many nodes report.
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
        # Merge first, so that a hung file system cannot delay it: failures and the outcome contain the step.
        self._state.merge_reports()
        await self._state.outbox.show(self._read_status)

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
            if await self._state.outbox.look(self._fence.is_down):
                self._state.deliver(-1, AttemptFenced(reason=self._fence.reason))
            await asyncio.sleep(SECONDS)


_SAVE_SECONDS = 3600.0
_STACKS_SECONDS = 10.0


def newest_own_save(reports: Sequence[ProgressReport], restored: int) -> int:
    """Return the newest step that this generation saved itself, not restored; 0: none."""
    saved = max((report.saved for report in reports), default=0)
    return saved if saved > restored else 0


def newest_begun_save(reports: Sequence[ProgressReport], total: int) -> int:
    """Return the newest step whose save may have begun; a request made now needs a later one.
    No save follows the last step, so that one always answers a request.
    """
    step = max((report.step for report in reports), default=0)
    return min(step, total - 1) if total else step


@dataclass(kw_only=True)
class _Stacks:
    """Pending stacks of a request, answered when all agents have written them, or at `until`."""

    request: str
    folder: str
    until: float
    waits: set[int]


class RequestHandlers:
    """Handlers of operator requests, one method per kind. None means that the answer comes later, from `finished`."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state, self._config, self._roster = state, state.config, state.roster
        self._saves: dict[str, int] = {}  # request -> step whose save is too old to answer it
        self._stacks: dict[str, _Stacks] = {}
        self._drills = DrillOrders(state)

    def handle(self, request: Request, now: float, wall: float) -> str | None:
        """Carry out the request; returns the answer. `now` is on the monotonic clock, `wall` the time of day."""
        match request.kind:
            case RequestKind.STOP:
                self._state.request_stop(self._state.stopping.on_request(request.reason, now))
                return "the command gets SIGTERM" if self._config.command else "the ranks were asked to save and stop"
            case RequestKind.DEADLINE if request.value is not None:
                return self._correct_end(request.value - wall, request.detail, now)
            case RequestKind.SAVE:
                return self._request_save(request)
            case RequestKind.STACKS:
                return self._request_stacks(request, now)
            case RequestKind.DRILL:
                return self._drill(request)
        return f"{REFUSED}a {request.kind} request needs a value"

    def _correct_end(self, left: float, lasts: str, now: float) -> str:
        """Record the job's end: in `left` seconds by this node's time of day, `lasts` seconds after the job's start."""
        stopping = self._state.stopping
        end = stopping.correct(now + left, float(lasts) if lasts.isascii() and lasts.isdigit() else None)
        off = left - (end - now)
        wrong = f"; the clock of this node is off: by its time of day it would be in {left:.0f} s" if off else ""
        return f"the job ends in {end - now:.0f} s{wrong}"

    def finished(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the name and answer of each request that can be answered now; each is returned once."""
        saved = newest_own_save(self._state.reports(), self._state.generation.restored)
        for name, before in list(self._saves.items()):
            if saved > before:
                del self._saves[name]
                yield name, f"saved at step {saved}"
        yield from self._drills.order()
        for name, stacks in list(self._stacks.items()):
            if not stacks.waits or now >= stacks.until:
                del self._stacks[name]
                yield stacks.request, stacks.folder

    def evidence_collected(self, node: int, message: EvidenceCollected) -> None:
        """Record that an agent has written the stacks of its ranks as far as possible."""
        stacks = self._stacks.get(message.incident)
        if stacks is not None:
            stacks.waits.discard(node)

    def repeat_save(self) -> None:
        """Repeat pending save requests to newly started ranks; the first save answers them."""
        self._saves = dict.fromkeys(self._saves, 0)
        if self._saves:
            self._ask_save()

    def _request_save(self, request: Request) -> str | None:
        if self._config.command:
            return f"{REFUSED}the ranks are the user's own command, orch cannot ask it to save"
        if self._state.stopping.stop is not None:
            return "a stop with a save is under way"
        self._saves[request.name] = newest_begun_save(self._state.reports(), self._state.progress.total)
        self._ask_save()
        return None

    def _ask_save(self) -> None:
        self._roster.broadcast(AskStop(reason=StopReason.SAVE_AND_GO_ON, seconds=_SAVE_SECONDS))

    def _request_stacks(self, request: Request, now: float) -> str | None:
        ranks = self._requested_ranks(request)
        if self._config.command or not ranks:
            why = "the ranks are the user's own command" if self._config.command else "there is no such rank or node"
            return f"{REFUSED}{why}"
        name = f"attach-{request.name.split('.')[2]}"
        bundle = self._state.attempt_dir.incident(name)
        waits = {member.node for member in self._roster.training_members()}
        folder = str(bundle.relative_to(self._state.attempt_dir.path.parent.parent))
        self._stacks[name] = _Stacks(
            request=request.name, folder=folder, until=now + _STACKS_SECONDS + 1.0, waits=waits
        )
        number = self._state.generation.number
        full = None if len(ranks) == self._config.cluster.world_size else tuple(ranks)
        self._roster.broadcast(CollectEvidence(generation=number, incident=name, full=full, seconds=_STACKS_SECONDS))
        return None

    def _requested_ranks(self, request: Request) -> list[int]:
        """Return the requested rank, the ranks of the requested node (by node rank), or all."""
        cluster = self._config.cluster
        if request.value is not None:
            return [int(request.value)] if 0 <= request.value < cluster.world_size else []
        if not request.detail:
            return list(range(cluster.world_size))
        if not request.detail.isdigit() or int(request.detail) >= cluster.nodes:
            return []
        first = int(request.detail) * cluster.ranks_per_node
        return list(range(first, first + cluster.ranks_per_node))

    def _drill(self, request: Request) -> str | None:
        refusal = self._drills.refuse(request)
        return dict(self._drills.order()).get(request.name) if refusal is None else refusal


_NO_NEWS = (agents.ProgressReport, agents.FlightRecords, agents.RankSaves)
"""Frequent messages that call for no decision."""


class MessageLoop:
    """Message handling while a part of the coordinator waits for something."""

    def __init__(self, state: CoordinatorState, monitor: JobMonitor, requests: RequestHandlers, timers: Timers) -> None:
        self._state, self._monitor, self._requests, self._timers = state, monitor, requests, timers
        self._node_failures = NodeFailures(state)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Handle messages until `condition` holds; returns False if it does not within `seconds`."""
        give_up = time.monotonic() + seconds
        while not condition():
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            await self._handle_next(min(left, 1.0))
        return True

    async def wait_for_news(self, seconds: float) -> None:
        """Handle messages until one may call for a decision, or for `seconds`."""
        news, give_up = False, time.monotonic() + seconds
        while not news and (left := give_up - time.monotonic()) > 0:
            news = await self._handle_next(left)

    async def _handle_next(self, seconds: float) -> bool:
        """Handle the next message, if one arrives within `seconds`; returns whether it may call for a decision."""
        try:
            node, message = await asyncio.wait_for(self._state.inbox.get(), max(0.0, seconds))
        except TimeoutError:
            return False
        finally:
            self._timers.check()
        try:
            self._handle(node, message)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self._on_agent_lost(node, f"it sent a {wire_name(type(message))!r} that cannot be read: {error!r}")
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
        """Return the position of a rank in the mesh; empty for a user program, which builds its own."""
        config = self._state.config
        return "" if config.command else config.parallel.place_words(config.cluster.world_size, rank)

    def _handle_generation_message(self, node: int, message: agents.AboutGeneration) -> None:
        """Handle a message about the current generation."""
        state = self._state
        member, generation = state.roster.members[node], state.generation
        match message:
            case agents.GenerationStore():
                state.roster.broadcast(message)
            case agents.RankExit():
                generation.note(RankEnd.from_report(message, member.name, time.monotonic(), self._place(message.rank)))
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
        reports = [member.progress for member in state.roster.present_members()]
        state.stopping.watch(reports, now)
        state.stopping.record_timings(reports)
        state.announce_stop(now)
        if state.stopping.is_due(now):
            state.request_stop(state.stopping.on_deadline(now))
