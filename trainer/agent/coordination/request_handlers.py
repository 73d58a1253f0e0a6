"""What the coordinator does about a request to the live job, and what it answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.coordination.drill_orders import DrillOrders
from trainer.contract.messages.agents import AskStop, CollectEvidence, EvidenceCollected, ProgressReport
from trainer.contract.ranks.progress import StopReason
from trainer.contract.requests import REFUSED, Request, RequestKind

_SAVE_SECONDS = 3600.0
_STACKS_SECONDS = 10.0


def newest_own_save(reports: Sequence[ProgressReport], restored: int) -> int:
    """The newest step that the generation of these reports has saved itself, not restored; 0: none."""
    saved = max((report.saved for report in reports), default=0)
    return saved if saved > restored else 0


def newest_begun_save(reports: Sequence[ProgressReport], total: int) -> int:
    """The newest step whose save may be under way: a request that comes now means a later one.

    No save can come after the last step, so that one answers in any case.
    """
    step = max((report.step for report in reports), default=0)
    return min(step, total - 1) if total else step


@dataclass(kw_only=True)
class _Stacks:
    """Stacks that agents are writing: the answer comes when all of them have finished, or at `until`."""

    request: str
    folder: str
    until: float
    waits: set[int]


class RequestHandlers:
    """One method for each kind of request; None instead of an answer means that it comes later, from `finished`."""

    def __init__(self, state: AttemptState) -> None:
        self._state, self._config, self._roster = state, state.config, state.roster
        self._saves: dict[str, int] = {}  # request -> step whose save does not answer it yet
        self._stacks: dict[str, _Stacks] = {}
        self._drills = DrillOrders(state)

    def handle(self, request: Request, now: float, wall: float) -> str | None:
        """Do what is requested; returns the answer. `now` is on the monotonic clock, `wall` the time of day."""
        match request.kind:
            case RequestKind.STOP:
                self._state.request_stop(self._state.stopping.asked(request.reason, now))
                return "the command gets SIGTERM" if self._config.command else "the ranks were asked to save and stop"
            case RequestKind.DEADLINE if request.value is not None:
                self._state.stopping.correct(now + request.value - wall)
                return f"the job ends in {request.value - wall:.0f} s"
            case RequestKind.SAVE:
                return self._request_save(request)
            case RequestKind.STACKS:
                return self._request_stacks(request, now)
            case RequestKind.DRILL:
                return self._drill(request)
        return f"{REFUSED}a {request.kind} request needs a value"

    def finished(self, now: float) -> Iterator[tuple[str, str]]:
        """The names of requests that can be answered now, and the answers; each request is returned once."""
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
        """An agent has written the stacks of its ranks, as far as it could."""
        stacks = self._stacks.get(message.incident)
        if stacks is not None:
            stacks.waits.discard(node)

    def repeat_save(self) -> None:
        """Ask ranks that have just been started for a save that was requested before: their first one answers it."""
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
        ranks = self._ranks_asked_for(request)
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

    def _ranks_asked_for(self, request: Request) -> list[int]:
        """One rank, those of one node by its node rank, or all."""
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
