"""Speed, MFU, memory, time shares and loss trend of a run's newest steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import linear_regression, mean, median
from typing import Any

from checkpointing.storage.durable import file_size
from orchestrator.cli.runs.run_reader import RECENT_STEPS, StepLine, parse_steps
from orchestrator.cli.terminal.render import size
from trainer.protocol.config import load
from trainer.protocol.logs.line_file import read_new_lines
from trainer.protocol.run_dir import AttemptDir, RunDir

_LINE_BYTES = 4096
"""Assumed bytes per line of steps.jsonl. With dozens of metrics, lines are longer and fewer steps are read."""
_LEAST_SHARE = 0.005
_LEAST_SECONDS = 0.001
_COMMUNICATION = {
    "receives": "for other stages",
    "sends": "until they take what is sent",
    "reductions": "in reductions",
}
_SECTIONS = ("data", "forward", "backward", "optimizer")
_FEWEST_FOR_TREND = 5


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """Figures for the newest `steps` of one generation; None for unknown figures.

    Speeds, `shares` and `exposed` are medians; the rest is from the newest step that has it. `shares` (of a step's
    time), `memory` (peaks in bytes) and `exposed` are from rank 0, which writes these lines. `exposed` has the shares
    of communication that is not overlapped, which are part of `waiting`. `ranks` compares all ranks in each figure:
    least, median, most, and the rank with the most. `traffic` is the number of bytes in a step's collectives, keyed by
    mesh dimension. `experts` is the number of tokens per expert relative to the layer's mean: least, median, most, and
    the expert with the most.
    """

    steps: int
    tokens_per_s_per_rank: float | None = None
    tflops_per_rank: float | None = None
    mfu: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    traffic: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, float] = field(default_factory=dict)


def training_figures(lines: Sequence[StepLine], world_size: int) -> TrainingFigures | None:
    """Return the figures for lines of steps.jsonl (oldest first); None if there are no lines."""
    own = newest_generation(lines)[-RECENT_STEPS:]
    if not own:
        return None
    speed = find_median(own, "tokens_per_s")
    shares = [time_shares(line) for line in own]
    return TrainingFigures(
        steps=len(own),
        tokens_per_s_per_rank=speed / world_size if speed is not None else None,
        tflops_per_rank=find_median(own, "tflops_per_rank"),
        mfu=find_median(own, "mfu"),
        shares={name: median(one.get(name, 0.0) for one in shares if one) for name in shares[-1]},
        exposed=_exposed_shares(own),
        memory=dict(own[-1].get("memory") or {}),
        ranks=_newest(own, "ranks"),
        traffic=_newest(own, "bytes"),
        experts=_newest(own, "experts"),
    )


def newest_generation(lines: Sequence[StepLine]) -> list[StepLine]:
    """Return the steps of the generation that wrote the last line."""

    def place(line: StepLine) -> tuple[Any, Any]:
        return line.get("attempt"), line.get("generation")

    return [line for line in lines if place(line) == place(lines[-1])]


def find_median(lines: Sequence[StepLine], key: str) -> float | None:
    """Return the median of a figure over the steps that have it; None if none has."""
    known = [line[key] for line in lines if isinstance(line.get(key), (int, float))]
    return median(known) if known else None


def time_shares(line: StepLine) -> dict[str, float]:
    """Return the shares of a step's time on rank 0 (its own work by section, waiting, saving).

    Empty for a line from an older orch.
    """
    if "work" not in line or not line["seconds"]:
        return {}
    parts = {**line["work"], "waiting": line["waiting"], "saving": line.get("stall", 0.0)}
    return {name: value / line["seconds"] for name, value in parts.items()}


def step_seconds(lines: Sequence[StepLine]) -> float | None:
    """Return the mean step time of the newest generation, excluding the time between steps."""
    took = [line["seconds"] for line in newest_generation(lines) if isinstance(line.get("seconds"), (int, float))]
    return mean(took) if took else None


def loss_trend(lines: Sequence[StepLine]) -> tuple[float | None, int]:
    """Return the rise of a line fitted to the newest generation's losses, and the number of steps it spans.

    Returns (None, 0) if there are too few losses. A fitted line is robust against a noisy step.
    """
    own = newest_generation(lines)
    losses = [(line["step"], line["loss"]) for line in own if isinstance(line.get("loss"), (int, float))]
    points = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(points) < _FEWEST_FOR_TREND or points[-1][0] == points[0][0]:
        return None, 0
    slope = linear_regression([step for step, _ in points], [loss for _, loss in points]).slope
    return slope * (points[-1][0] - points[0][0]), own[-1]["step"] - own[0]["step"]


def figures_of_run(place: RunDir) -> TrainingFigures | None:
    """Return the figures of the newest attempt that has trained; None if there is none, or it cannot be read."""
    try:
        for attempt in reversed(place.all_attempts()):
            if lines := _newest_lines(attempt):
                return training_figures(lines, load(place, attempt.number).cluster.world_size)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return None


def _newest_lines(attempt: AttemptDir) -> list[StepLine]:
    start = max(0, file_size(attempt.metrics) - RECENT_STEPS * _LINE_BYTES)
    return list(parse_steps(read_new_lines(attempt.metrics, start)[0]))


def describe_figures(figures: TrainingFigures | None) -> dict[str, str]:
    """Return the lines of `orch show`, keyed by label, without shares below half a percent."""
    if figures is None:
        return {}
    speed = figures.tokens_per_s_per_rank
    words = [f"{round(speed)} tokens/s per rank"] if speed is not None else []
    words += [f"{figures.tflops_per_rank:.3g} TFLOP/s per rank"] if figures.tflops_per_rank is not None else []
    words += [f"MFU {100 * figures.mfu:.1f} %"] if figures.mfu is not None else []
    steps = f"median of {figures.steps} steps" if figures.steps > 1 else "one step"
    parts = describe_shares(figures.shares, figures.exposed)
    peaks = ", ".join(f"{name} {size(peak)}" for name, peak in figures.memory.items())
    traffic = ", ".join(f"{name} {size(total)}" for name, total in figures.traffic.items())
    return {
        "speed": "   ".join([*words, f"({steps})"]) if words else "",
        "time": f"{parts} of a step on rank 0" if parts else "",
        "memory": f"{peaks} at most on rank 0" if peaks else "",
        "ranks": _describe_slowest(figures.ranks),
        "bubble": _describe_bubble(figures.ranks),
        "traffic": f"{traffic} in each step on rank 0" if traffic else "",
        "experts": _describe_experts(figures.experts),
    }


def describe_shares(shares: Mapping[str, float], exposed: Mapping[str, float]) -> str:
    """Return the shares of a step's time above half a percent, with the known parts of `waiting`."""
    parts = [f"{words} {100 * exposed[kind]:.0f} %" for kind, words in _COMMUNICATION.items() if kind in exposed]
    waits = f" ({', '.join(parts)})" if parts else ""
    known = {name: share for name, share in shares.items() if share >= _LEAST_SHARE}
    return ", ".join(f"{name} {100 * share:.0f} %{waits * (name == 'waiting')}" for name, share in known.items())


def _exposed_shares(lines: Sequence[StepLine]) -> dict[str, float]:
    """Return the share of a step for each kind of communication. A line records the previous step's communication.

    Empty for lines from older releases.
    """
    pairs = [(before["seconds"], line["exposed"]) for before, line in pairwise(lines) if line.get("exposed")]
    known = [(seconds, exposed) for seconds, exposed in pairs if seconds]
    names = [name for name in _COMMUNICATION if known and name in known[-1][1]]
    return {name: median(exposed.get(name, 0.0) / seconds for seconds, exposed in known) for name in names}


def _newest(lines: Sequence[StepLine], key: str) -> dict[str, Any]:
    """Return the value from the newest line that has one; empty for lines from older releases."""
    return next((dict(line[key]) for line in reversed(lines) if line.get(key)), {})


def _describe_slowest(ranks: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the rank with the most work in each relevant section, relative to the median."""
    known = {name: one for name, one in ranks.items() if name in _SECTIONS and one["median"] >= _LEAST_SECONDS}
    parts = [f"{name} rank {one['rank']:.0f} ({one['most'] / one['median']:.2f} x)" for name, one in known.items()]
    return f"slowest, relative to the median: {', '.join(parts)}" if parts else ""


def _describe_bubble(ranks: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the share of a step that pipeline ranks spend waiting for other stages; empty without a pipeline."""
    if (found := ranks.get("bubble")) is None:
        return ""
    shares = f"{100 * found['least']:.0f} to {100 * found['most']:.0f} %"
    return f"ranks wait {shares} of a step for other stages, rank {found['rank']:.0f} most"


def _describe_experts(experts: Mapping[str, float]) -> str:
    if not experts:
        return ""
    most = f"expert {experts['expert']:.0f} of layer {experts['layer']:.0f}"
    return f"{experts['least']:.2f} to {experts['most']:.2f} x the mean tokens of their layer, most {most}"
