"""A simulated world of ranks that do their own work with realistic noise, and agents that report it now and then."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.agent.watch.stragglers import StragglerVerdict, WorkWindows, should_report_work
from trainer.protocol.config_sections.fault_detection_config import StragglerConfig
from trainer.protocol.rank_progress.progress import SECTIONS

SHARES = {"data": 0.04, "forward": 0.30, "backward": 0.56, "optimizer": 0.10}
assert list(SHARES) == [section.name.lower() for section in SECTIONS]


@dataclass(frozen=True, kw_only=True)
class World:
    """What the ranks are like; a step takes 0.2 s of work, agents report every half second."""

    ranks: int = 8
    per_node: int = 4
    tp: int = 1
    stages: int = 1
    uneven: float = 1.0  # work of the last coordinate, in times that of the first
    noise: float = 0.05  # lognormal, of every step of every rank
    hiccups: float = 0.001  # share of a rank's steps that take five times as long
    busy: float = 0.002  # share of steps at which the whole machine becomes slow for a while
    step: float = 0.2
    report: float = 0.5
    look: float = 0.1  # agents read the cells so often, and keep what is worth telling

    def coordinate(self, rank: int) -> tuple[int, int]:
        return rank % self.tp, rank * self.stages // self.ranks

    def load(self, rank: int) -> float:
        tensor, stage = self.coordinate(rank)
        last = self.tp * self.stages - 1
        return 1 + (self.uneven - 1) * (stage * self.tp + tensor) / last if last else 1.0


@dataclass(frozen=True, kw_only=True)
class Slow:
    """One rank's work takes `ratio` times as long from step `begin` to step `end`, all of the excess in `section`."""

    rank: int
    ratio: float
    begin: int
    end: int = 10**9
    section: str = "backward"


@dataclass(kw_only=True)
class Story:
    """What was said, and at which step."""

    verdicts: list[tuple[int, StragglerVerdict]] = field(default_factory=list)

    def named(self) -> list[tuple[int, int]]:
        return [(step, verdict.rank) for step, verdict in self.verdicts if not verdict.over]


@dataclass(kw_only=True)
class _Agent:
    """Reads its ranks' cells now and then, and reports less often."""

    ranks: range
    due: float
    next_look: float = 0.0
    told: int = 0
    rows: list[list[int]] = field(default_factory=list)

    def look(self, world: World, dice: random.Random, now: float, step: int, work: list[list[float]]) -> None:
        if now < self.next_look:
            return
        self.next_look = now + world.look * dice.uniform(0.5, 1.5)
        if should_report_work(self.told, step):
            self.told = step
            self.rows += [[rank, step, *(int(spent * 1e9) for spent in work[rank])] for rank in self.ranks]

    def report(self, world: World, dice: random.Random, now: float) -> list[list[int]]:
        if now < self.due:
            return []
        self.due = now + world.report * dice.uniform(0.95, 1.05)
        rows, self.rows = self.rows, []
        return rows


def live(
    world: World, seed: int, steps: int, slow: Slow | None = None, *, until: Callable[[Story], bool] | None = None
) -> Story:
    """So many steps of this world under the eyes of a Pace."""
    dice = random.Random(seed)
    nodes = [f"n{rank // world.per_node}" for rank in range(world.ranks)]
    pace = WorkWindows(world.ranks, world.coordinate, nodes, StragglerConfig())
    work = [[0.0] * len(SHARES) for _ in range(world.ranks)]
    agents = [
        _Agent(ranks=range(first, min(first + world.per_node, world.ranks)), due=dice.random() * world.report)
        for first in range(0, world.ranks, world.per_node)
    ]
    story, now, busy, busy_until = Story(), 0.0, 1.0, 0
    for step in range(1, steps + 1):
        if step > busy_until:
            busy = 1.0
            if dice.random() < world.busy:
                busy, busy_until = dice.uniform(1.5, 4.0), step + dice.randrange(1, 40)
        longest = 0.0
        for rank in range(world.ranks):
            longest = max(longest, _step(world, dice, work[rank], rank, step, busy, slow))
        now += longest * 1.2  # and the collectives
        for agent in agents:
            agent.look(world, dice, now, step, work)
            story.verdicts += [(step, verdict) for verdict in pace.add_report(agent.report(world, dice, now))]
        if until is not None and until(story):
            break
    return story


def _step(
    world: World, dice: random.Random, spent: list[float], rank: int, step: int, busy: float, slow: Slow | None
) -> float:
    """One step of one rank: the seconds of its own work."""
    length = world.step * world.load(rank) * busy * math.exp(dice.gauss(0.0, world.noise))
    if dice.random() < world.hiccups:
        length *= 5
    if step == 1:
        length *= 20  # it compiles
    excess = 0.0
    if slow is not None and rank == slow.rank and slow.begin <= step < slow.end:
        excess = length * (slow.ratio - 1)
    for at, (section, share) in enumerate(SHARES.items()):
        spent[at] += length * share + (excess if slow is not None and section == slow.section else 0.0)
    return length + excess
