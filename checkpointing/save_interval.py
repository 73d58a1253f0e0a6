"""The save interval, skipped saves, and the latest time for the final save. Pure functions. All times are in seconds.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, and J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SMALL = 1e-3
"""Save cost, as a share of the mean time between failures, below which Young's formula is accurate enough."""

_NOTICEABLE = 0.2
"""Relative change below which an interval is kept, because measurements vary."""


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """Measured costs of this run's saves, in seconds."""

    step: float
    """Duration of a step without a save."""
    stall: float
    """How long one save blocks training."""
    slowdown: float = 0.0
    """Total slowdown of the steps that run during one save."""
    save: float = 0.0
    """99th percentile of the time from the start of a save to its commit."""

    @property
    def cost(self) -> float:
        """The training time that one save costs."""
        return self.stall + self.slowdown


@dataclass(frozen=True)
class Interval:
    """Steps from one save to the next, and the reason."""

    steps: int
    reason: str


def optimal(cost: float, mtbf: float) -> float:
    """Return how many seconds of training between two saves minimize the time lost.

    `cost` is the cost of one save, `mtbf` the mean time between failures. Uses Young's sqrt(2 C M) if C is small
    compared with M, else Daly's higher-order form. Returns M if a save costs at least 2 M.
    """
    if cost <= _SMALL * mtbf:
        return math.sqrt(2 * cost * mtbf)
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def interval(measured: SaveCosts, mtbf: float, *, least: int, most: int) -> Interval:
    """Return the optimal number of steps between two saves.

    The interval is at least as long as a save takes, and within [least, most].
    """
    wanted = optimal(measured.cost, mtbf)
    words = f"a save costs {_text(measured.cost)}, a failure occurs every {_text(mtbf)}: {_text(wanted)} between saves"
    steps = max(1, round(wanted / measured.step))
    busy = math.ceil(measured.save / measured.step) + 1
    if steps < busy:
        steps, words = busy, f"{words}, but a save takes {_text(measured.save)}"
    if steps < least:
        steps, words = least, f"{words}, but at least checkpoint.auto.least={least} steps"
    if steps > most:
        steps, words = most, f"{words}, but at most {most} steps"
    return Interval(steps, words)


def differs_enough(before: int, after: int) -> bool:
    """Return whether a new interval differs enough from the current interval to replace it."""
    return abs(after - before) > _NOTICEABLE * before


def retry_after(interval: int, failures: int) -> int:
    """Return the number of steps from a failed or skipped save until the next try.

    It is a tenth of the interval, doubled for each further consecutive failure, up to the whole interval. An `interval`
    of 0 (no regular saves) counts as a hundred steps.
    """
    usual = interval or 100
    pause: int = max(1, usual // 10) << min(failures - 1, 10)
    return min(usual, pause)


def skip_before_stop(left: float, *, interval: float, save: float) -> bool:
    """Return whether to skip a save because a stop, which also saves, is due in `left` seconds.

    Such a save protects the work only until that stop. It pays for its cost C after sqrt(2 C M) seconds of work, so the
    stop must be at least half an interval away. A save that cannot finish by then protects nothing.
    """
    return 0 <= left < max(interval / 2, save)


def last_save_before(end: float, *, save: float, step: float, slop: float, margin: float) -> float:
    """Return the latest time to request a save so that it is committed `margin` before `end`.

    `save` is the 99th percentile of save times, `step` the length of a step (ranks agree within two steps), `slop` the
    time by which the end may come earlier than announced.
    """
    return end - margin - slop - 2 * step - save


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all samples do not exceed; 0 if there are no samples."""
    if not samples:
        return 0.0
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def _text(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.3g} s"
