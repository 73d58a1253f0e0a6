"""PURE: how often to save, when not to, and when at the latest; all times are seconds.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, and J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SMALL = 1e-3
"""Below this share of the time between failures a save's cost is small, and Young's formula is exact enough."""

_NOTICEABLE = 0.2
"""An interval that changes by less than this share stays as it is: measurements scatter."""


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """What saves have cost so far on this run."""

    step: float
    """A step without a save."""
    stall: float
    """How long training stands still for one save."""
    slowdown: float = 0.0
    """What the steps beside one save take longer, in all."""
    save: float = 0.0
    """From the beginning of a save to its commit, slow ones counted (the 99th percentile)."""

    @property
    def cost(self) -> float:
        """Training time that one save takes away."""
        return self.stall + self.slowdown


@dataclass(frozen=True)
class Interval:
    """Steps from one save to the next, and why."""

    steps: int
    reason: str


def optimal(cost: float, mtbf: float) -> float:
    """Seconds of training between two saves that lose the least, for a save's `cost` and the time between failures.

    Young's sqrt(2 C M) where C is small against M, Daly's higher order form elsewhere; M where a save costs more
    than two failures are apart.
    """
    if cost <= _SMALL * mtbf:
        return math.sqrt(2 * cost * mtbf)
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def interval(measured: SaveCosts, mtbf: float, *, least: int, most: int) -> Interval:
    """Steps between two saves: the optimum, never faster than a save takes, within [least, most]."""
    wanted = optimal(measured.cost, mtbf)
    words = f"a save costs {_text(measured.cost)}, a failure comes every {_text(mtbf)}: {_text(wanted)} between saves"
    steps = max(1, round(wanted / measured.step))
    busy = math.ceil(measured.save / measured.step) + 1
    if steps < busy:
        steps, words = busy, f"{words}, but one takes {_text(measured.save)}"
    if steps < least:
        steps, words = least, f"{words}, but at least checkpoint.auto.least={least} steps"
    if steps > most:
        steps, words = most, f"{words}, but at most {most} steps"
    return Interval(steps, words)


def differs_enough(before: int, after: int) -> bool:
    """Whether a new interval differs enough from the one in force to replace it."""
    return abs(after - before) > _NOTICEABLE * before


def retry_after(interval: int, failures: int) -> int:
    """Steps from a failed or skipped save to the next try: a tenth of the interval, doubled for each failure in a row.

    `interval` is 0 where saves have no cadence; then a hundred steps stand for it.
    """
    usual = interval or 100
    pause: int = max(1, usual // 10) << min(failures - 1, 10)
    return min(usual, pause)


def skip_before_stop(left: float, *, interval: float, save: float) -> bool:
    """Whether to leave a save out because a stop, which saves too, is due in `left` seconds.

    What a save protects is the work until that stop. After sqrt(2 C M) seconds of work it pays for its cost C when the
    stop is at least half an interval away; and one that would not be done by then protects nothing.
    """
    return 0 <= left < max(interval / 2, save)


def last_save_before(end: float, *, save: float, step: float, slop: float, margin: float) -> float:
    """The moment at which the last save before `end` must be asked for, so that it is committed `margin` before it.

    `save` is the 99th percentile of save times, `step` the length of a step (ranks agree within two), `slop` how much
    earlier than announced the end may begin.
    """
    return end - margin - slop - 2 * step - save


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed; 0 when there are none."""
    if not samples:
        return 0.0
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def _text(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.3g} s"
