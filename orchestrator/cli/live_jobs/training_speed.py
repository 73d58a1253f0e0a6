"""PURE: how fast a run trains, and where its loss goes, by its newest steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.cli.runs.run_reader import StepMetrics

_FEWEST = 5
"""Steps that a trend needs."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed:
    """`step_seconds` without what lies between two steps; None for what is not known yet.

    `loss_change` is that of a straight line through the losses of the last `loss_steps` steps.
    """

    step_seconds: float | None = None
    loss_change: float | None = None
    loss_steps: int = 0


def training_speed(steps: Sequence[StepMetrics]) -> TrainingSpeed:
    """The speed of the newest generation among `steps`, which are in the order they were trained."""
    if not steps:
        return TrainingSpeed()
    newest = steps[-1]
    own = [one for one in steps if (one.attempt, one.generation) == (newest.attempt, newest.generation)]
    took = [one.seconds for one in own if isinstance(one.seconds, (int, float))]
    change = _change(own)
    return TrainingSpeed(
        step_seconds=sum(took) / len(took) if took else None,
        loss_change=change,
        loss_steps=newest.step - own[0].step if change is not None else 0,
    )


def _change(own: Sequence[StepMetrics]) -> float | None:
    """By least squares, so that a noisy step does not make a trend."""
    points = [(one.step, one.loss) for one in own if isinstance(one.loss, (int, float)) and math.isfinite(one.loss)]
    if len(points) < _FEWEST or points[-1][0] == points[0][0]:
        return None
    middle = sum(step for step, _ in points) / len(points)
    spread = sum((step - middle) ** 2 for step, _ in points)
    slope = sum((step - middle) * loss for step, loss in points) / spread
    return slope * (points[-1][0] - points[0][0])
