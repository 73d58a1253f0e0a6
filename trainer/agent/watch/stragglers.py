"""Stragglers: ranks that are slower than their peers, by section of a step. Pure.
Ranks with the same model-parallel coordinate do the same work on different data. Each is compared with the median of
the *others*. In a group of two, a rank is slow only if it is slower than both its peer and its own past. If no rank has
a peer (pure tensor or pipeline parallelism), each is compared with its own past, and that ratio with its neighbours',
since a common slowdown comes from the data or the machine. A single rank is never judged.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import sub, truediv
from statistics import fmean, median

from trainer.protocol.config_sections.fault_detection_config import StragglerConfig
from trainer.protocol.rank_progress.progress import SECTIONS

WINDOW = 4
"""Steps per window, the shortest interval over which ranks are compared; windows end at multiples of it."""
_SURE = 4.0  # a slow rank must exceed its peers by this many standard deviations of the group's noise
_MIXED = 16  # quartiles are meaningless in groups up to this size
_FALSE_NAMES = 5e-6  # false alarms allowed per window of a whole group
_RAREST = 5e-4  # minimum assumed share of hiccups in a healthy group
_FAR = 6.0  # a window this many standard deviations from its neighbours is a hiccup


@dataclass(frozen=True, kw_only=True)
class Level:
    """Resolution of the comparison: `span` windows of `WINDOW` steps are combined."""

    span: int
    name: str


SHORT, LONG = Level(span=1, name="short"), Level(span=6, name="long")
"""Short windows detect a much slower rank quickly; long windows detect a slightly slower one."""


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """A rank is slower than its peers or, if `over`, as fast as its peers again."""

    rank: int
    node: str
    section: str  # the one with the largest excess: data, forward, backward or optimizer
    ratio: float
    step: int  # last step examined, as counted in the ranks' work
    steps: int  # slow steps so far
    gpu_hours: float  # lost by the whole world, which waits for it
    reason: str
    over: bool = False


def should_report_work(reported: int, steps: int) -> bool:
    """Return whether to report a rank's work up to `steps`, given that work up to `reported` has been reported.
    A reading from the very end of a window makes the window exact; readings within it are useless.
    """
    return steps // WINDOW > reported // WINDOW


def reference(ordered: Sequence[float]) -> float:
    """Return the median of the others, which is the same for every rank in the slower half."""
    return _middle(ordered, len(ordered) - 1)


def _middle(ordered: Sequence[float], count: int, first: int = 0) -> float:
    """Return the median of `count` sorted values, starting with `first`."""
    return (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2


def spread(ordered: Sequence[float]) -> float:
    """Return a robust standard deviation of a healthy rank's ratio to its peers, from one window of a group."""
    count = len(ordered)
    if count > _MIXED:
        return (ordered[count * 3 // 4] - ordered[count // 4]) / 1.349 / _middle(ordered, count)
    slower, faster = reference(ordered), _middle(ordered, count - 1, 1)
    aside = [abs(value / (slower if 2 * at >= count else faster) - 1) for at, value in enumerate(ordered)]
    return median(aside) / 0.6745


def limit(level: Level, noise: float, config: StragglerConfig) -> float:
    """Return the ratio above which a window of this level is slow; `noise` is that of one short window."""
    return 1 + max(config.ratio - 1, _SURE * noise / math.sqrt(level.span))


def window_limit(level: Level, noise: float, config: StragglerConfig) -> float:
    """Return the ratio each window must exceed. Long windows are few, so only their median must exceed the limit."""
    bar = limit(level, noise, config)
    return bar if level is SHORT else 1 + (bar - 1) / 2


def steady(ratios: Sequence[float], noise: float) -> float:
    """Return the mean of neighbouring windows, excluding hiccups."""
    middle = median(ratios)
    aside = sorted(abs(ratio - middle) for ratio in ratios)
    farthest = max(_FAR * noise, aside[len(aside) // 2])
    return fmean(ratio for ratio in ratios if abs(ratio - middle) <= farthest)


def needed_windows(level: Level, hiccups: float, ranks: int, config: StragglerConfig) -> int:
    """Return the number of consecutive slow windows required. `hiccups` is the share of hiccups in a healthy group."""
    if level is LONG:
        return config.windows
    often = min(0.5, max(_RAREST, hiccups))
    return max(config.windows, math.ceil(math.log(_FALSE_NAMES / ranks) / math.log(often)))


def is_slow(
    level: Level, ratios: Sequence[float], *, noise: float, hiccups: float, ranks: int, config: StragglerConfig,
    than: str = "its peers",
) -> tuple[bool, str]:  # fmt: skip
    """Return whether the latest run of slow windows reveals a straggler, and why.
    `than` names the baseline.
    """
    wanted = needed_windows(level, hiccups, ranks, config)
    if len(ratios) < wanted:
        return False, f"slow in {len(ratios)} of {wanted} {level.name} windows"
    bar, found = limit(level, noise, config), median(ratios[-wanted:])
    if found <= bar:
        return False, f"{found:.2f} x {than} is not above {bar:.2f} x"
    return True, f"{found:.2f} x {than} in {wanted} {level.name} windows in a row (limit {bar:.2f} x)"


def section(own: Sequence[float], others: Sequence[float]) -> tuple[str, float]:
    """Return the section (in the order of `SECTIONS`) with the largest excess over the peers, and its ratio."""
    at = max(range(len(own)), key=lambda index: own[index] - others[index])
    ratio = own[at] / others[at] if others[at] > 0 else math.inf
    return SECTIONS[at].name.lower(), ratio


_TOTAL, _STEPS = len(SECTIONS), len(SECTIONS) + 1
_MEMORY = 60  # windows for the median noise
_FEW = 3  # in groups up to this size the straggler itself causes noise, so the newest windows do not count
_FADING = 0.98  # decay of the hiccup statistics per window
_OWN = 20  # windows for the median of a rank's own earlier pace
_RECENT = 3 * LONG.span  # windows too new for that, since the rank may have become slow in them
_FEWEST_OWN = 5
_MIN_OWN_SECONDS = 2.0
"""Seconds of usual work for which a rank without peers must have been slow, since load from other programs passes."""
_SOME = 500


@dataclass(kw_only=True)
class _Case:
    """A named straggler."""

    level: Level
    ratio: float
    section: str
    reason: str
    steps: int
    lost: float  # nanoseconds for which every rank of the world has waited for it
    recent: list[float] = field(default_factory=list)
    well: int = 0


@dataclass(kw_only=True)
class _Streak:
    """Consecutive windows in which a rank was slow."""

    begin: int  # step
    ratios: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class _Found:
    named: list[int] = field(default_factory=list)
    over: list[tuple[int, _Case]] = field(default_factory=list)


class _Group:
    """Ranks that do the same work. A window ends when all of them have reported its last step or a later one.
    A rank's work is taken from whole reports, never split between two of them. So a hiccup falls into one window,
    however far apart the reports are.
    """

    def __init__(self, ranks: Sequence[int], config: StragglerConfig, *, same_work: bool = True) -> None:
        """`same_work` is False for ranks with different work; each is then compared with its own past."""
        size = len(ranks)
        self.ranks, self.same_work, self._config = ranks, same_work, config
        self._steps = array("q", [-1]) * size
        self._start, self._mark, self._block = ([array("d", [0.0]) * size for _ in range(_STEPS + 1)] for _ in range(3))
        self._waiting, self._closed, self._furthest = size, 0, 0
        self.begin = self.end = 0
        self._noises: deque[float] = deque(maxlen=_MEMORY)
        self._recent: deque[tuple[Sequence[float], float]] = deque(maxlen=LONG.span)
        needs_past = size == 2 or not same_work
        self._past: list[deque[float]] = [deque(maxlen=_OWN + _RECENT) for _ in ranks] if needs_past else []
        self._sections: list[deque[list[float]]] = [] if same_work else [deque(maxlen=_OWN + _RECENT) for _ in ranks]
        self._hiccups = self._looked = 0.0
        self._streaks: dict[Level, dict[int, _Streak]] = {SHORT: {}, LONG: {}}
        self.cases: dict[int, _Case] = {}

    def add_report(self, place: int, steps: int, sections: Sequence[float]) -> _Found | None:
        """Add a rank's work so far and return the result of the window that this report completes, or None."""
        before = self._steps[place]
        if steps <= before:
            return None
        if before < self.end <= steps:
            for mark, value in zip(self._mark, (*sections, sum(sections), steps), strict=True):
                mark[place] = value
            self._waiting -= 1
        self._steps[place] = steps
        self._furthest = max(self._furthest, steps)
        return None if self._waiting else self._close()

    def _close(self) -> _Found:
        # Nothing is known about a rank before its first report, and its work until then (first steps compile and
        # allocate) is not representative, so windows begin after it.
        found = self._judge() if self._closed >= 2 else _Found()
        self._start, self._mark = self._mark, self._start
        if self._closed < 2 or (self._closed - 1) % LONG.span == 0:
            self._block = [array("d", column) for column in self._start]
        self._closed += 1
        # The end is beyond all reports, so that windows share no report if reports are rarer than windows.
        self.begin, self.end = self.end, (max(self.end, self._furthest) // WINDOW + 1) * WINDOW
        self._waiting = len(self.ranks)
        return found

    # -- one window ---------------------------------------------------------------------------------------------------

    def _judge(self) -> _Found:
        steps = self.end - self.begin
        values = self._each_step(self._start, _TOTAL)
        normal = reference(sorted(values))
        if normal <= 0:
            return _Found()  # nothing was measured
        if self._past and not all(map(self._earlier, range(len(self._past)))):
            self._remember(values)
            return _Found()
        relative = [value / self._earlier(place) for place, value in enumerate(values)] if self._past else values
        # A lasting difference between two ranks is not noise.
        self._noises.append(spread(sorted(relative)))
        noise = self._noise()
        compared = values if self.same_work else relative
        if not self.same_work:
            normal = reference(sorted(compared))
        self._recent.append((compared, normal))
        found = _Found(over=self._follow(compared, normal, noise, steps))
        self._remember(values)
        self._extend(SHORT, self._slow_ratios(SHORT, noise), noise, found)
        if (self._closed - 1) % LONG.span == 0:
            self._extend(LONG, self._slow_ratios(LONG, noise), noise, found)
        return found

    def _earlier(self, place: int) -> float:
        """Return a rank's pace from before it could have become slow, or 0 if unknown."""
        earlier = list(self._past[place])[:-_RECENT]
        return median(earlier) if len(earlier) >= _FEWEST_OWN else 0.0

    def _scale(self, place: int) -> float:
        """Return the nanoseconds per unit of the compared values."""
        return 1.0 if self.same_work else self._earlier(place)

    def _noise(self) -> float:
        noises = list(self._noises)
        if len(self.ranks) <= _FEW:
            noises = noises[: max(_FEWEST_OWN, len(noises) - _RECENT)]
        return median(noises)

    def _slow_ratios(self, level: Level, noise: float) -> dict[int, float]:
        """Return the ratios of ranks whose newest window at this level is slow even without hiccups, by rank index."""
        values, normal = self._recent[-1]
        if level is LONG:
            values = [value / self._scale(at) for at, value in enumerate(self._each_step(self._block, _TOTAL))]
            normal = reference(sorted(values))
        bar = window_limit(level, noise, self._config)
        over = [place for place, value in enumerate(values) if value > bar * normal]
        ratios = {place: self._ratio(place, level.span, noise) for place in over}
        return {place: ratio for place, ratio in ratios.items() if ratio > bar}

    def _ratio(self, place: int, span: int, noise: float) -> float:
        """Return the slowdown relative to the peers.
        In a group of two, or with different work, it is at most the slowdown relative to the rank's own past.
        """
        windows = list(self._recent)[-span:]
        against = steady([values[place] / normal for values, normal in windows], noise)
        if not self._past:
            return against
        usual = self._earlier(place) / self._scale(place)
        return min(against, steady([values[place] / usual for values, _ in windows], noise))

    def _each_step(self, since: "list[array[float]]", column: int) -> list[float]:
        """Return every rank's nanoseconds per step since `since`."""
        spent = map(sub, self._mark[column], since[column])
        return list(map(truediv, spent, map(sub, self._mark[_STEPS], since[_STEPS])))

    def _remember(self, values: Sequence[float]) -> None:
        """Store the pace of ranks that are compared with their own past and are not known to be slow."""
        for place, past in enumerate(self._past):
            if place not in self.cases:
                past.append(values[place])
        if not self.same_work:
            columns = [self._each_step(self._start, column) for column in range(_TOTAL)]
            for place, seen in enumerate(self._sections):
                seen.append([spent[place] for spent in columns])

    def _extend(self, level: Level, raised: dict[int, float], noise: float, found: _Found) -> None:
        """Extend the streaks of slow ranks and break the others; streaks that are long enough become cases."""
        streaks = self._streaks[level]
        broken = [place for place in streaks if place not in raised]
        gone = sum(len(streaks.pop(place).ratios) for place in broken)
        if level is SHORT:  # streaks that break are typical of a healthy group
            self._hiccups = self._hiccups * _FADING + gone
            self._looked = self._looked * _FADING + len(self.ranks)
        hiccups = self._hiccups / self._looked
        for place, ratio in raised.items():
            if place in self.cases:
                continue
            since = self.begin if level is SHORT else int(self._block[_STEPS][place])
            streak = streaks.setdefault(place, _Streak(begin=since))
            streak.ratios.append(ratio)
            slow, reason = is_slow(
                level, streak.ratios, noise=noise, hiccups=hiccups, ranks=len(self.ranks), config=self._config,
                than="its peers" if self.same_work else "its own past, relative to its neighbours',",
            )  # fmt: skip
            if slow and self._is_long_enough(place, streak):
                self._open(level, place, streak, reason)
                found.named.append(place)

    def _is_long_enough(self, place: int, streak: _Streak) -> bool:
        """Return whether a rank without peers has been slow for long enough: short steps fill three windows quickly."""
        if self.same_work:
            return True
        usual = self._recent[-1][1] * self._scale(place)
        return usual * (self.end - streak.begin) >= _MIN_OWN_SECONDS * 1e9

    def _open(self, level: Level, place: int, streak: _Streak, reason: str) -> None:
        section, most = self._section(level, place)
        steps, ratio = self.end - streak.begin, median(streak.ratios)
        normal = self._recent[-1][1] * self._scale(place)
        self.cases[place] = _Case(
            level=level,
            ratio=ratio,
            section=section,
            reason=f"{reason}, {steps} steps, most in {section} ({most:.2f} x)",
            steps=steps,
            lost=(ratio - 1) * normal * steps,
        )
        for streaks in self._streaks.values():
            streaks.pop(place, None)
        if self._past:  # its newest windows may have been slow already, so they cannot serve as a reference
            usual, past = self._earlier(place), self._past[place]
            for at in range(max(0, len(past) - _RECENT), len(past)):
                past[at] = usual

    def _section(self, level: Level, place: int) -> tuple[str, float]:
        """Return the section with most of the excess; in a large group, a sample of peers is sufficient."""
        since, size = self._start if level is SHORT else self._block, len(self.ranks)
        if not self.same_work:
            usual = [median(spent) for spent in zip(*self._sections[place], strict=True)]
            return section([self._each_step(since, column)[place] for column in range(_TOTAL)], usual)
        some = range(0, size, max(1, size // _SOME))
        columns = [self._each_step(since, column) for column in range(_TOTAL)]
        others = [median(spent[at] for at in some if at != place) for spent in columns]
        return section([spent[place] for spent in columns], others)

    def _follow(self, values: Sequence[float], normal: float, noise: float, steps: int) -> list[tuple[int, _Case]]:
        """Add this window's cost to the named ranks, and return those that have recovered."""
        over = []
        for place, case in self.cases.items():
            case.lost += max(0.0, values[place] - normal) * self._scale(place) * steps
            case.steps += steps
            case.recent.append(values[place] / normal)
            if len(case.recent) < case.level.span:
                continue
            # Closer to the peers than to the ratio at which the rank was named.
            well = steady(case.recent, noise) < 1 + (case.ratio - 1) / 2
            case.recent, case.well = [], case.well + 1 if well else 0
            if case.well >= self._config.windows:
                over.append((place, case))
        for place, _ in over:
            del self.cases[place]
        return over


class WorkWindows:
    """Windows of one generation's ranks; a new generation needs a new instance."""

    def __init__(
        self, world: int, coordinate: Callable[[int], Hashable], nodes: Sequence[str], config: StragglerConfig
    ) -> None:
        """`nodes` names each rank's node. Ranks with the same `coordinate` are compared."""
        together: dict[Hashable, list[int]] = {}
        for rank in range(world):
            together.setdefault(coordinate(rank), []).append(rank)
        self._world, self._nodes = world, nodes
        alone = [ranks[0] for ranks in together.values() if len(ranks) == 1]
        groups = self._groups = [_Group(ranks, config) for ranks in together.values() if len(ranks) > 1]
        if len(alone) > 1:  # each has different work; if all slow down, the machine or the data is the cause
            groups.append(_Group(alone, config, same_work=False))
        self._places = {rank: (group, place) for group in groups for place, rank in enumerate(group.ranks)}

    def add_report(self, rows: Iterable[Sequence[int]]) -> list[StragglerVerdict]:
        """Add rows of [rank, steps, total nanoseconds in each of `SECTIONS`] and return verdicts on stragglers."""
        verdicts = []
        for rank, steps, *sections in rows:
            if rank not in self._places or len(sections) != _TOTAL:
                continue
            group, place = self._places[rank]
            found = group.add_report(place, steps, sections)
            if found is not None:
                verdicts += [self._verdict(group, at, case, over=True) for at, case in found.over]
                verdicts += [self._verdict(group, at, group.cases[at], over=False) for at in found.named]
        return verdicts

    def slow(self) -> list[StragglerVerdict]:
        """Return the ranks that are slow now, with what they have cost so far."""
        return [
            self._verdict(group, place, case, over=False)
            for group in self._groups
            for place, case in group.cases.items()
        ]

    def _verdict(self, group: _Group, place: int, case: _Case, *, over: bool) -> StragglerVerdict:
        rank = group.ranks[place]
        hours = case.lost * 1e-9 * self._world / 3600
        usual = "as its peers again" if group.same_work else "as before"
        reason = f"as fast {usual} after {case.steps} steps" if over else case.reason
        return StragglerVerdict(
            rank=rank,
            node=self._nodes[rank],
            section=case.section,
            ratio=round(case.ratio, 3),
            step=group.begin,
            steps=case.steps,
            gpu_hours=hours,
            reason=f"rank {rank} on {self._nodes[rank]}: {reason}",
            over=over,
        )
