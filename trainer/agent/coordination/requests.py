"""Operator requests to a live job: saves, stops, stacks and drills, and the answers to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.processes.background_tasks import RepeatedRead
from trainer.agent.rank_processes import local_ranks
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.messages.agents import AskStop, CollectEvidence, EvidenceCollected, InjectFault, ProgressReport
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.requests import REFUSED, Request, RequestKind, pending


def _all_train(state: RunningAttempt) -> bool:
    """Return whether every rank of the current generation has trained a step or, for a command, has started."""
    if state.stage is not AttemptStage.RUNNING or state.generation.first_failure is not None:
        return False
    reports = state.reports()
    trained = bool(state.config.command) or all(report.stepped for report in reports)
    return len(reports) == state.config.cluster.nodes and trained


READ_SECONDS = 2.0
"""Maximum number of seconds for which reading requests may keep the coordinator from its other files."""


class RequestInbox:
    """Reads the request folder and returns every request once."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._seen: set[str] = set()
        self._requests = RepeatedRead(lambda: pending(folder, attempt, self._seen), folder)

    async def poll(self) -> list[Request]:
        try:
            found = await self._requests.result(READ_SECONDS)
        except OSError:
            return []
        self._seen.update(request.name for request in found)
        return found


_SAVE_SECONDS, _STACKS_SECONDS = 3600.0, 10.0


def newest_own_save(reports: Sequence[ProgressReport], restored: int) -> int:
    """Return the newest step that this generation saved itself rather than restored, or 0 if there is none."""
    saved = max((report.saved for report in reports), default=0)
    return saved if saved > restored else 0


def newest_begun_save(reports: Sequence[ProgressReport], total: int) -> int:
    """Return the newest step whose save may have begun; a request made now needs a later one.
    No save comes after the last step's, so the last step always answers a request.
    """
    step = max((report.step for report in reports), default=0)
    return min(step, total - 1) if total else step


@dataclass(kw_only=True)
class _Stacks:
    """Pending request for stacks, answered when all agents have written them or at `until`, whichever comes first."""

    request: str
    folder: str
    until: float
    waits: set[int]


class RequestHandlers:
    """Handlers of operator requests, one method per kind. None means that `finished` will give the answer later."""

    def __init__(self, state: RunningAttempt) -> None:
        self._state, self._config, self._roster = state, state.config, state.roster
        self._saves: dict[str, int] = {}  # request -> step whose save is too old to answer it
        self._stacks: dict[str, _Stacks] = {}
        # Request -> order and answer, until all ranks train. A fault injected during startup would hit no rank, or
        # would hit the restart after another fault.
        self._drills: dict[str, tuple[InjectFault, str]] = {}
        self._drill_serial = 0
        self._saved, self._saved_at = -1, 0.0  # newest save of this generation, and when it was seen or asked for

    def handle(self, request: Request, now: float, wall: float) -> str | None:
        """Carry out the request and return the answer. `now` is on the monotonic clock; `wall` is the time of day."""
        match request.kind:
            case RequestKind.STOP:
                self._state.request_stop(self._state.stopping.on_request(request.reason, now))
                if self._can_ask():
                    return "the ranks were asked to save and stop"
                return f"the command gets SIG{self._config.watch.stop_signal}"
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
        """Record when the job ends: in `left` seconds by this node's time of day, `lasts` seconds after the job's
        start.
        """
        stopping = self._state.stopping
        end = stopping.correct(now + left, float(lasts) if lasts.isascii() and lasts.isdigit() else None)
        off = left - (end - now)
        wrong = f"; this node's clock is off: by its time of day, the end would be in {left:.0f} s" if off else ""
        return f"the job ends in {end - now:.0f} s{wrong}"

    def finished(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the name and answer of each request that can be answered now; each is returned once."""
        saved = newest_own_save(self._state.reports(), self._state.generation.restored)
        for name, before in list(self._saves.items()):
            if saved > before:
                del self._saves[name]
                yield name, f"saved at step {saved}"
        yield from self._order_drills()
        for name, stacks in list(self._stacks.items()):
            if not stacks.waits or now >= stacks.until:
                del self._stacks[name]
                yield stacks.request, stacks.folder

    def evidence_collected(self, node: int, message: EvidenceCollected) -> None:
        """Record that an agent has written all the stacks it can."""
        stacks = self._stacks.get(message.incident)
        if stacks is not None:
            stacks.waits.discard(node)

    def repeat_save(self) -> None:
        """Repeat pending save requests to newly started ranks; the first save answers them."""
        self._saves = dict.fromkeys(self._saves, 0)
        if self._saves:
            self._ask_save()

    def ask_due_save(self, now: float) -> None:
        """Ask a program to save if it has not done so for `checkpoints.save_minutes`."""
        reports, every = self._state.reports(), 60.0 * self._config.checkpoints.save_minutes
        saved = max((report.saved for report in reports), default=0)
        if saved != self._saved or not self._can_ask():  # before the first step, nothing is worth a save
            self._saved, self._saved_at = saved, now
        elif every and now - self._saved_at >= every and self._state.stopping.stop is None:
            self._saved_at = now
            self._ask_save()

    def _request_save(self, request: Request) -> str | None:
        if not self._can_ask():
            return f"{REFUSED}the ranks run the user's own command, which orch cannot ask to save"
        if self._state.stopping.stop is not None:
            return "a stop with a save is under way"
        self._saves[request.name] = newest_begun_save(self._state.reports(), self._state.progress.total)
        self._ask_save()
        return None

    def _can_ask(self) -> bool:
        """Return whether all ranks read requests: orch's own do, and a user's program once it has called orch."""
        reports = self._state.reports()
        return not self._config.command or (bool(reports) and all(report.answers for report in reports))

    def _ask_save(self) -> None:
        self._roster.broadcast(AskStop(reason=StopReason.SAVE_AND_GO_ON, seconds=_SAVE_SECONDS))

    def _request_stacks(self, request: Request, now: float) -> str | None:
        ranks = self._requested_ranks(request)
        if self._config.command or not ranks:
            why = "the ranks are the user's own command" if self._config.command else "no such rank or node"
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
        if self._state.stopping.stop is not None:
            return f"{REFUSED}the job is being stopped"
        order, answer = local_ranks.drill_order(request, self._config.cluster)
        if order is None:
            return answer
        self._drills[request.name] = (order, answer)
        # `finished` answers earlier drills that are still waiting, and this one too.
        return None if len(self._drills) > 1 else next((answer for _, answer in self._order_drills()), None)

    def _order_drills(self) -> Iterator[tuple[str, str]]:
        """Order the waiting drills once all ranks are training, and yield the request names and answers."""
        if not self._drills or not _all_train(self._state):
            return
        generation, drills, self._drills = self._state.generation, self._drills, {}
        for name, (order, answer) in drills.items():
            self._drill_serial += 1
            generation.note_drill(order.kind)
            self._roster.broadcast(replace(order, generation=generation.number, serial=self._drill_serial))
            yield name, answer
