"""A job on a made-up clock: ranks go through their phases, slow for good reasons or hung."""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.sampling import active_processes
from trainer.protocol.rank_progress.progress import SentMessages, StageActivity

NORMAL = {"data": 0.04, "forward": 0.25, "backward": 0.4, "optimizer": 0.06}
"""Seconds of a rank's own work in each phase of an ordinary step."""

FOR_EVER = math.inf


@dataclass(frozen=True, slots=True)
class Stay:
    """A rank's time in one phase, until its next stay begins."""

    at: float
    phase: str
    step: int
    first: bool
    collective: int
    lives_until: float  # when the last sign of life of its own process is to be seen
    state: str
    helper: str = ""  # who works meanwhile: its "children", its "writer"
    moment: StageActivity | None = None  # of a pipeline
    sent: SentMessages | None = None

    def is_helped(self) -> bool:
        children, writer = [1] if self.helper == "children" else [], 2 if self.helper == "writer" else None
        return len(active_processes(self.phase, self.state, 0, children, writer)) > 1


@dataclass(kw_only=True)
class Actor:
    """One rank: where it will be free to go on, what it has joined, and how it looks from outside."""

    rank: int
    node: str
    free: float = 0.0
    step: int = 0
    first: bool = True
    joins: list[float] = field(default_factory=list)
    stays: deque[Stay] = field(default_factory=deque)
    messages: int = 0  # begun, besides what it has joined
    moment: StageActivity | None = None
    sent: SentMessages | None = None

    def stay(self, phase: str, seconds: float, *, lives: bool = False, state: str = "S", helper: str = "") -> None:
        until, begun = self.free + seconds if lives else self.free, len(self.joins) + self.messages
        self.stays.append(
            Stay(self.free, phase, self.step, self.first, begun, until, state, helper, self.moment, self.sent)
        )
        self.free += seconds


@dataclass(frozen=True, kw_only=True)
class Slow:
    """What makes one step slow: phases of some ranks take `seconds` or `times` as long as usual."""

    ranks: frozenset[int]
    phase: str
    seconds: float = 0.0
    times: float = 1.0
    lives: bool = False
    state: str = "S"
    helper: str = ""


class Job:
    """`sharded`: ranks also meet in forward and backward; `ahead`: they run a step ahead of their sums, as GPUs do."""

    def __init__(self, seed: int, *, nodes: int = 2, per_node: int = 4, sharded: bool = False, ahead: bool = False):
        self.rng = random.Random(seed)
        self.actors = [
            Actor(rank=rank, node=f"n{rank // per_node}", free=self.rng.uniform(0, 2))
            for rank in range(nodes * per_node)
        ]
        self.sharded, self.ahead = sharded, ahead
        self.finding: Finding | None = None  # what records show instead of what the ranks have joined
        self.locked: frozenset[int] = frozenset()
        self._met = 0.0

    def everybody(self) -> frozenset[int]:
        return frozenset(actor.rank for actor in self.actors)

    def begin(self, *, init: float = 20, restore: float = 5, compiling: float = 10) -> None:
        """Up to the first step; times differ between ranks, and all work that is slow shows signs of life."""
        for phase, seconds in (("init", init), ("restore", restore)):
            for actor in self.actors:
                actor.stay(phase, seconds * self.rng.uniform(0.3, 1), lives=True)
            self._meet()
        self.step(Slow(ranks=self.everybody(), phase="compile", seconds=compiling, lives=True))
        for actor in self.actors:
            actor.first = False

    def step(self, *slow: Slow, cut: bool = False) -> None:
        """One step of all ranks, with an evaluation and a save before it where `slow` asks for them.

        `cut`: they meet at its end, and never get away.
        """
        for phase in ("checkpoint", "eval"):
            asked = [one for one in slow if one.phase == phase]
            for one in asked:
                for actor in self._of(one.ranks):
                    share = self.rng.uniform(0.2, 1) if len(one.ranks) > 1 else 1
                    actor.stay(phase, one.seconds * share, lives=one.lives, state=one.state, helper=one.helper)
            if asked and phase == "eval":
                self._meet()  # its result is summed up: some wait inside the phase
        for phase in ("data", "compile"):
            self._play_all(phase, slow)
        self._passes(slow)
        self._play_all("optimizer", slow)
        self._meet(ahead=self.ahead, cut=cut)
        for actor in self.actors:
            actor.free += NORMAL["optimizer"]
            actor.step += 1
            actor.stay("optimizer", 0.0)  # the boundary of the step still counts as part of it

    def _passes(self, slow: Sequence[Slow]) -> None:
        """The forward and backward passes of all ranks."""
        for phase in ("forward", "backward"):
            self._play_all(phase, slow)
            if self.sharded:
                self._meet()

    def _play_all(self, phase: str, slow: Sequence[Slow]) -> None:
        for actor in self.actors:
            self._play(actor, phase, [one for one in slow if one.phase == phase and actor.rank in one.ranks])

    def _play(self, actor: Actor, phase: str, slow: list[Slow]) -> None:
        own = self._work(actor, phase)
        if phase not in NORMAL and not slow:
            return
        for one in slow:
            own = own * one.times + one.seconds
        lives, state = any(one.lives for one in slow), next((one.state for one in slow), "S")
        helper = next((one.helper for one in slow), "")
        if phase == "optimizer":
            actor.stay(phase, 0.0, state=state)  # the sum comes first: its work is done when all have met
        else:
            actor.stay(phase, own, lives=lives, state=state, helper=helper)

    def _work(self, actor: Actor, phase: str) -> float:
        """Seconds of a rank's own work in a phase of an ordinary step."""
        return NORMAL.get(phase, 0.0) * self.rng.lognormvariate(0, 0.15)

    def _meet(self, *, ahead: bool = False, cut: bool = False) -> None:
        for actor in self.actors:
            actor.joins.append(actor.free)
        met = FOR_EVER if cut else max(actor.free for actor in self.actors)
        done = self._met if ahead and not cut else met
        self._met = met
        for actor in self.actors:
            actor.free = max(actor.free, done)

    def _of(self, ranks: frozenset[int]) -> Iterator[Actor]:
        return (actor for actor in self.actors if actor.rank in ranks)

    def stuck(self, rank: int) -> Stay:
        """Where a rank stands for ever."""
        return next(stay for stay in reversed(self.actors[rank].stays) if stay.at < FOR_EVER)

    def halt(self, rank: int, state: str, after: float) -> None:
        """The rank that stands for ever is halted there, `after` seconds after it came."""
        last = self.stuck(rank)
        self.actors[rank].stays.append(replace(last, lives_until=last.at + after, state=state))
        self.actors[rank].stays = deque(stay for stay in self.actors[rank].stays if stay.at < FOR_EVER)

    def records(self, now: float) -> Finding:
        """What the flight records of all ranks say at this moment."""
        if self.finding is not None:
            return self.finding
        counts = [sum(at <= now for at in actor.joins[-8:]) + max(0, len(actor.joins) - 8) for actor in self.actors]
        behind = tuple(rank for rank, count in enumerate(counts) if count == min(counts))
        if len(behind) == len(counts):
            return Finding(kind="none", reason="no rank waits inside a collective")
        reason = f"ranks {behind} never entered collective #{min(counts) + 1}"
        return Finding(kind="missing", ranks=behind, group="0", sequence=min(counts) + 1, reason=reason)
