"""PURE: detects NaN and loss spikes. All ranks read the same sums, so all of them decide alike."""

import math
from bisect import bisect_left, insort
from collections import deque

from trainer.contract.config_sections.fault_detection_config import SpikeConfig

_NORMAL = 1.4826
"""Median absolute deviation to standard deviation, of normally distributed values."""
_FLOOR = 0.01
"""The deviation counts as at least this share of the median: losses that hardly differ make no spike of a ripple."""
_AS_A_FACTOR = 0.5
"""Of the limit, in deviations of the logarithm: losses near zero differ by factors, the highest far above the median
being as usual as the lowest just below it."""
_HIGH = 0.5
"""A spike is so much above the median, as a share of it: what is rare in a quiet run need not be harmful."""


class BadStep(ArithmeticError):
    """A step whose loss or gradient is none to go on from; nothing that came after it has been saved.

    `position` is where its batch stands in the data: what was consumed before it.
    """

    def __init__(self, step: int, position: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}; its batch is at position {position} of the data")
        self.step, self.position, self.reason = step, position, reason


class SpikeDetector:
    """Judges each loss by those of the newest accepted steps."""

    def __init__(self, config: SpikeConfig, window: deque[float]) -> None:
        """`window`: the newest accepted losses, which the training state owns and checkpoints keep."""
        self._config, self._window = config, window
        while len(window) > config.window:
            window.popleft()
        self._sorted = sorted(window)

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Why a step with these is a bad one; None when it is accepted."""
        # A number that is none would make the weights so too.
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss}, gradient norm {grad_norm}"
        reason = self._spike(loss)
        if reason is None:
            self._accept(loss)
        return reason

    def _spike(self, loss: float) -> str | None:
        limit = self._config.deviations
        # Too few to know what is usual; 0 looks for NaN only.
        if not limit or len(self._window) < self._config.window:
            return None
        median = _median(self._sorted)
        above = loss - median
        # Cheap, and true of nearly every step: the deviation need not be known.
        if above <= _HIGH * abs(median):
            return None
        spread = _NORMAL * _median(sorted(abs(each - median) for each in self._window))
        deviations = above / max(spread, _FLOOR * abs(median), 1e-12)
        if deviations <= limit or self._is_usual_factor(loss, median, _AS_A_FACTOR * limit):
            return None
        return (
            f"loss {loss:.6g} is {deviations:.0f} robust standard deviations above {median:.6g}, the median of the "
            f"{len(self._window)} steps before it (detection.spike.deviations={limit:g})"
        )

    def _is_usual_factor(self, loss: float, median: float, limit: float) -> bool:
        """Whether the logarithm of `loss` is within `limit` deviations; False where a loss of the window has none."""
        if self._sorted[0] <= 0:
            return False
        usual = math.log(median)
        spread = _NORMAL * _median(sorted(abs(math.log(each) - usual) for each in self._window))
        return math.log(loss) - usual <= limit * max(spread, _FLOOR)

    def _accept(self, loss: float) -> None:
        self._window.append(loss)
        insort(self._sorted, loss)
        if len(self._window) > self._config.window:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
