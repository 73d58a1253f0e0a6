"""PURE: detects NaN and loss spikes. All ranks read the same sums, so all of them decide alike."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from trainer.contract.config_sections.fault_detection_config import SpikeConfig
from trainer.worker.training.reduction import StepResult

_NORMAL = 1.4826
"""Median absolute deviation to standard deviation, of normally distributed values."""
_FLOOR = 0.01
"""The deviation counts as at least this share of the median: losses that hardly differ make no spike of a ripple."""
_AS_A_FACTOR = 0.5
"""Of the limit, in deviations of the logarithm: losses near zero differ by factors, the highest far above the median
being as usual as the lowest just below it."""
_HIGH = 0.5
"""A spike is so much above the median, as a share of it: what is rare in a quiet run need not be harmful."""

_LEVEL = 10.0
"""A new level of the losses is at most this many times the old one."""


class BadStep(ArithmeticError):
    """A step whose loss or gradient is none to go on from; nothing that came after it has been saved.

    `position` is where its batch stands in the data: what was consumed before it.
    """

    def __init__(self, step: int, position: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}; its batch is at position {position} of the data")
        self.step, self.position, self.reason = step, position, reason


class LossSpike(BadStep):
    """A loss that is a number, and far above those before it."""


class SpikeDetector:
    """Judges each loss by those of the newest accepted steps."""

    def __init__(
        self,
        config: SpikeConfig,
        window: deque[float],
        on_new_level: Callable[[int, str], None] = lambda step, why: None,
    ) -> None:
        """`window`: the newest accepted losses, which the training state owns and checkpoints keep.

        `on_new_level` is called with the step from which on the losses are higher for good, and the reason.
        """
        self._config, self._window, self._on_new_level = config, window, on_new_level
        while len(window) > config.window:
            window.popleft()
        self._sorted = sorted(window)

    def judge(self, result: StepResult, position: int, replaced: int) -> None:
        """Raise BadStep for a step that is none to go on from; `replaced`: batches skipped in its favour."""
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
        """Whether other data or another task explains a spike better than one more bad batch."""
        # As many batches in a row as may be skipped were no better.
        if replaced < max(1, self._config.roll_backs):
            return False
        # Bad bytes raise a loss without a bound by orders of magnitude, and training on them does harm.
        median = _median(self._sorted)
        scale = median if self._sorted[0] > 0 else self._distance(median)
        return loss - median <= (_LEVEL - 1) * scale

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
        if self._sorted[0] > 0:
            spread = _NORMAL * _median(sorted(abs(each - median) for each in self._window))
            excess, unit = above / max(spread, _FLOOR * median), "robust standard deviations"
            usual = self._is_usual_factor(loss, median, _AS_A_FACTOR * limit)
        else:
            # Losses around zero have no usual factor. Equal ones, as of equal rewards, give no scale at all.
            largest = self._distance(median)
            excess, unit = above / largest if largest else 0.0, "times the largest distance of the window"
            usual = False
        if excess <= limit or usual:
            return None
        return (
            f"loss {loss:.6g} is {excess:.0f} {unit} above {median:.6g}, the median of the "
            f"{len(self._window)} steps before it (detection.spike.deviations={limit:g}; "
            "if losses rise on purpose: detection.spike.deviations=0)"
        )

    def _distance(self, median: float) -> float:
        """Return the largest distance of a loss in the window from its median."""
        return max(median - self._sorted[0], self._sorted[-1] - median)

    def _is_usual_factor(self, loss: float, median: float, limit: float) -> bool:
        """Whether the logarithm of `loss` is within `limit` deviations; all losses of the window are positive."""
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
