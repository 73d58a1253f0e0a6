"""The losses of a run by step, read from its folder; what several runs have in common; a curve in one line."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.storage.durable import number
from orchestrator.cli.comparison.equality import computed_part
from orchestrator.cli.comparison.metrics_lines import metrics_lines
from trainer.contract.run_dir import RunDir

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=*#%@"
"""From the lowest to the highest loss; the second for terminals that cannot show the first."""
NOT_FINITE = "x"
_OUTLIERS = 0.02
"""Share of the highest losses that do not stretch the scale."""


@dataclass(frozen=True)
class LossCurve:
    """Loss by step, NaN and infinities included; of a step that was trained again, the newest."""

    losses: Mapping[int, float] = field(default_factory=dict)
    tokens_per_s: float | None = None  # median over all steps
    computed: Mapping[int, str] = field(default_factory=dict)  # all that training computed, by `computed_part`

    @classmethod
    def read(cls, run_dir: Path) -> "LossCurve":
        """What the attempts of a run have written; empty for a run that has trained nothing, or is not visible."""
        losses: dict[int, float] = {}
        speeds: list[float] = []
        computed: dict[int, str] = {}
        for attempt in RunDir(run_dir).all_attempts():
            _read_into(attempt.metrics, losses, speeds, computed)
        return cls(losses, statistics.median(speeds) if speeds else None, computed)


def _read_into(path: Path, losses: dict[int, float], speeds: list[float], computed: dict[int, str]) -> None:
    for step, fields in metrics_lines(path):
        try:
            losses[step] = number(fields["loss"])
        except (ValueError, KeyError, TypeError):
            continue  # of a version that writes something else
        computed[step] = computed_part(fields)
        if isinstance(speed := fields.get("tokens_per_s"), (int, float)):
            speeds.append(speed)


def common_steps(curves: Sequence[LossCurve], most: int) -> list[int]:
    """Steps that all of them have trained, at most so many, evenly spread, the last one included."""
    shared = sorted(set.intersection(*(set(curve.losses) for curve in curves))) if curves else []
    if len(shared) <= most:
        return shared
    return [shared[round((index + 1) * len(shared) / most) - 1] for index in range(most)]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The same scale for all curves that are compared: from step `first` to `last`, from loss `low` to `high`."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def of(cls, curves: Sequence[LossCurve]) -> "Scale | None":
        """None where no run has a finite loss."""
        steps = [step for curve in curves for step in curve.losses]
        finite = sorted(loss for curve in curves for loss in curve.losses.values() if math.isfinite(loss))
        if not finite:
            return None
        high = finite[max(0, math.ceil(len(finite) * (1 - _OUTLIERS)) - 1)]
        return cls(first=min(steps), last=max(steps), low=finite[0], high=high)


def sparkline(curve: LossCurve, scale: Scale | None, width: int, bars: str = BARS) -> str:
    """The curve in at most `width` characters; empty for a run without losses, a gap where it has none."""
    if scale is None or not curve.losses:
        return ""
    cells: list[list[float]] = [[] for _ in range(min(width, scale.last - scale.first + 1))]
    for step, loss in curve.losses.items():
        cells[(step - scale.first) * len(cells) // (scale.last - scale.first + 1)].append(loss)
    return "".join(_bar(cell, scale, bars) for cell in cells).rstrip()


def _bar(losses: Sequence[float], scale: Scale, bars: str) -> str:
    """The mean of a few steps as one character."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not losses:
        return " "
    if not finite:
        return NOT_FINITE
    height = (statistics.fmean(finite) - scale.low) / ((scale.high - scale.low) or 1.0)
    return bars[min(len(bars) - 1, max(0, int(height * len(bars))))]
