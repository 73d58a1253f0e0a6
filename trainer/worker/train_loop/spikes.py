"""Detection of NaN and loss spikes. All ranks read the same sums, so they make the same decisions."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from trainer.protocol.config_sections.fault_detection_config import SpikeConfig
from trainer.worker.train_loop.reduction import StepResult

_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation for normally distributed values."""
_FLOOR = 0.01
"""Minimum deviation as a share of the median, so that ripples in nearly constant losses do not count."""
_AS_A_FACTOR = 0.5
"""Share of the limit that applies to deviations of the logarithm.

Losses near zero vary by factors, so losses far above the median are as normal as losses slightly below it.
"""
_HIGH = 0.5
"""Minimum height of a spike above the median, as a share of the median. Smaller spikes may be harmless."""

_LEVEL = 10.0
"""Maximum ratio of a new loss level to the old level."""


class BadStep(ArithmeticError):
    """A step has an unusable loss or gradient. `position` is its batch's position in the data."""

    def __init__(self, step: int, position: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}; its batch is at position {position} of the data")
        self.step, self.position, self.reason = step, position, reason


class LossSpike(BadStep):
    """A finite loss is far above the preceding losses."""


class SpikeDetector:
    """Detector that compares each loss with those of the newest accepted steps."""

    def __init__(
        self,
        config: SpikeConfig,
        window: deque[float],
        on_new_level: Callable[[int, str], None] = lambda step, why: None,
    ) -> None:
        """Start with `window`, the newest accepted losses. `on_new_level` takes a level's first step and a reason."""
        self._config, self._window, self._on_new_level = config, window, on_new_level
        while len(window) > config.window:
            window.popleft()
        self._sorted = sorted(window)

    def judge(self, result: StepResult, position: int, replaced: int) -> None:
        """Raise BadStep for an unusable step. `replaced` is the number of batches skipped before it."""
        reason = self.check(result.loss, result.grad_norm)
        if reason is None:
            return
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            raise BadStep(result.step, position, reason)
        if not self._is_new_level(result.loss, replaced):
            raise LossSpike(result.step, position, reason)
        self._window.clear()
        self._sorted.clear()
        self._accept(result.loss)
        self._on_new_level(result.step, f"{reason}, like those of {replaced} skipped batches before it")

    def _is_new_level(self, loss: float, replaced: int) -> bool:
        """Return whether other data or another task explains a spike better than one more bad batch."""
        # Skipping the maximum number of consecutive batches did not help.
        if replaced < max(1, self._config.roll_backs):
            return False
        # Corrupt data raises an unbounded loss by orders of magnitude, and training on it does harm.
        median = _median(self._sorted)
        scale = median if self._sorted[0] > 0 else self._distance(median)
        return loss - median <= (_LEVEL - 1) * scale

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Return why a step with these values is bad, or None if it is accepted."""
        # Non-finite values would make the weights non-finite.
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss}, gradient norm {grad_norm}"
        reason = self._spike(loss)
        if reason is None:
            self._accept(loss)
        return reason

    def _spike(self, loss: float) -> str | None:
        limit = self._config.deviations
        # Too few losses for a baseline; a limit of 0 checks for NaN only.
        if not limit or len(self._window) < self._config.window:
            return None
        median = _median(self._sorted)
        above = loss - median
        # This check is cheap and true for nearly every step, so the deviation is rarely computed.
        if above <= _HIGH * abs(median):
            return None
        if self._sorted[0] > 0:
            spread = _NORMAL * _median(sorted(abs(each - median) for each in self._window))
            excess, unit = above / max(spread, _FLOOR * median), "robust standard deviations"
            usual = self._is_usual_factor(loss, median, _AS_A_FACTOR * limit)
        else:
            # Losses around zero have no usual factor. Equal losses, for example from equal rewards, give no scale.
            largest = self._distance(median)
            excess, unit = above / largest if largest else 0.0, "times the window's largest deviation"
            usual = False
        if excess <= limit or usual:
            return None
        return (
            f"loss {loss:.6g} is {excess:.0f} {unit} above {median:.6g}, the median of the "
            f"{len(self._window)} steps before it (detection.spike.deviations={limit:g}; "
            "if losses rise on purpose: detection.spike.deviations=0)"
        )

    def _distance(self, median: float) -> float:
        return max(median - self._sorted[0], self._sorted[-1] - median)

    def _is_usual_factor(self, loss: float, median: float, limit: float) -> bool:
        """Return whether the logarithm of `loss` is within `limit` deviations. Requires a positive window."""
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
