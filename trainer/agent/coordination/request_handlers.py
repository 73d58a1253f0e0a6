"""What the coordinator does about a request that somebody put into the run directory, and what it answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.agent.control.tcp_transport import Message
from trainer.agent.coordination.request_inbox import RequestInbox
from trainer.agent.coordination.stopping import Stop, Stopping
from trainer.agent.nodes.roster import Roster
from trainer.agent.ranks import fault_injection
from trainer.contract.config import JobConfig
from trainer.contract.progress import StopReason
from trainer.contract.requests import REFUSED, Request, RequestKind
from trainer.contract.run_dir import AttemptDir

_SAVE_SECONDS = 3600.0
_STACKS_SECONDS = 10.0


@dataclass(kw_only=True)
class _Stacks:
    """Stacks that agents are writing: the answer comes when all have, or at `until`."""

    request: str
    folder: str
    until: float
    waits: set[int]


class RequestHandlers:
    """One method for each kind of request; None instead of an answer says that it will come later."""

    def __init__(
        self, config: JobConfig, *, attempt: AttemptDir, stopping: Stopping, request_inbox: RequestInbox,
        ask_stop: Callable[[Stop], None], roster: Roster, wall: Callable[[], float],
    ) -> None:  # fmt: skip
        self._config, self._attempt, self._roster = config, attempt, roster
        self._stopping, self._request_inbox, self._ask_stop, self._wall = stopping, request_inbox, ask_stop, wall
        self._stacks: dict[str, _Stacks] = {}
        self._drills = 0

    def to(self, request: Request, now: float, begun: int, generation: int) -> str | None:
        """Do what is asked; `begun` is the newest step whose save may be under way, `generation` the one that runs."""
        match request.kind:
            case RequestKind.STOP:
                self._ask_stop(self._stopping.asked(request.reason, now))
                return "the ranks are told to save and stop"
            case RequestKind.DEADLINE if request.value is not None:
                self._stopping.correct(now + request.value - self._wall())
                return f"the job ends in {request.value - self._wall():.0f} s"
            case RequestKind.SAVE:
                return self._save(request, begun)
            case RequestKind.STACKS:
                return self._ask_stacks(request, now, generation)
            case RequestKind.DRILL:
                return self._drill(request, generation)
        return f"{REFUSED}a {request.kind} request needs a value"

    def late(self, now: float, saved: int) -> Iterator[tuple[str, str]]:
        """Requests that can be answered now, by name, and the answers; each is told once.

        `saved` is the newest step that the generation that runs has saved; 0: none.
        """
        for name in self._request_inbox.saved(saved):
            yield name, f"saved at step {saved}"
        for name, stacks in list(self._stacks.items()):
            if not stacks.waits or now >= stacks.until:
                del self._stacks[name]
                yield stacks.request, stacks.folder

    def evidence_collected(self, node: int, message: Message) -> None:
        """An agent has written what it could."""
        stacks = self._stacks.get(message["incident"])
        if stacks is not None:
            stacks.waits.discard(node)

    def ask_again(self) -> None:
        """Ranks that have just been started hear of a save that was asked for before."""
        if self._request_inbox.reset_awaited_saves():
            self._ask_save()

    def _save(self, request: Request, begun: int) -> str | None:
        if self._config.command:
            return f"{REFUSED}the ranks are the user's own command, orch cannot ask it to save"
        if self._stopping.stop is not None:
            return "a stop with a save is under way"
        self._ask_save()
        self._request_inbox.await_save(request.name, begun)
        return None

    def _ask_save(self) -> None:
        self._roster.broadcast("ask", reason=int(StopReason.SAVE_AND_GO_ON), seconds=_SAVE_SECONDS)

    def _ask_stacks(self, request: Request, now: float, generation: int) -> str | None:
        ranks = self._ranks_asked_for(request)
        if self._config.command or not ranks:
            why = "the ranks are the user's own command" if self._config.command else "there is no such rank or node"
            return f"{REFUSED}{why}"
        name = f"attach-{request.name.split('.')[2]}"
        bundle = self._attempt.incident(name)
        waits = {member.node for member in self._roster.training_members()}
        folder = str(bundle.relative_to(self._attempt.path.parent.parent))
        self._stacks[name] = _Stacks(
            request=request.name, folder=folder, until=now + _STACKS_SECONDS + 1.0, waits=waits
        )
        self._roster.broadcast("evidence", generation=generation, incident=name, full=ranks, seconds=_STACKS_SECONDS)
        return None

    def _ranks_asked_for(self, request: Request) -> list[int]:
        """One rank, those of one node by its place, or all."""
        cluster = self._config.cluster
        if request.value is not None:
            return [int(request.value)] if 0 <= request.value < cluster.world_size else []
        if not request.detail:
            return list(range(cluster.world_size))
        if not request.detail.isdigit() or int(request.detail) >= cluster.nodes:
            return []
        first = int(request.detail) * cluster.ranks_per_node
        return list(range(first, first + cluster.ranks_per_node))

    def _drill(self, request: Request, generation: int) -> str:
        order, answer = fault_injection.drill_order(request, self._config.cluster)
        if order is not None:
            self._drills += 1
            self._roster.broadcast("drill", generation=generation, serial=self._drills, **order)
        return answer
