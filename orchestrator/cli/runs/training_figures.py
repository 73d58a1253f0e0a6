"""Speed, MFU, memory and time shares of a run's newest steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from orchestrator.cli.runs.run_reader import RECENT_STEPS, file_size, shares_of_step
from orchestrator.cli.terminal.render import count, size
from trainer.protocol.config import load
from trainer.protocol.logs.line_file import read_new_lines
from trainer.protocol.run_dir import AttemptDir, RunDir

_LINE_BYTES = 4096
"""Upper bound of a line in steps.jsonl. A workload with dozens of metrics has longer ones, so fewer steps are read."""
_LEAST_SHARE = 0.005
_LEAST_SECONDS = 0.001
_COMMUNICATION = {
    "receives": "for other stages",
    "sends": "until they take what is sent",
    "reductions": "in reductions",
}
_SECTIONS = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """Medians over the newest `steps` of one generation; None for unknown figures.

    `shares` of a step's time and `memory` (peaks in bytes) are those of rank 0, which writes these lines. So is
    `exposed`, the shares of communication that is not overlapped, which are parts of `waiting`. `ranks` compares all
    ranks by figure: least, median, most, and the rank with the most. `traffic` is the bytes of a step's collectives by
    mesh dimension. `experts` is tokens per expert relative to the layer's mean: least, median, most, and the expert.
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


def training_figures(lines: Sequence[Mapping[str, Any]], world_size: int) -> TrainingFigures | None:
    """Return the figures of lines of steps.jsonl, oldest first; None without lines."""
    if not lines:
        return None
    newest = lines[-1].get("generation")
    own = [line for line in lines if line.get("generation") == newest][-RECENT_STEPS:]
    speed = _median([line.get("tokens_per_s") for line in own])
    shares = [shares_of_step(line) for line in own]
    return TrainingFigures(
        steps=len(own),
        tokens_per_s_per_rank=speed / world_size if speed is not None else None,
        tflops_per_rank=_median([line.get("tflops_per_rank") for line in own]),
        mfu=_median([line.get("mfu") for line in own]),
        shares={name: median(one.get(name, 0.0) for one in shares if one) for one in shares[-1:] for name in one},
        exposed=_exposed_shares(own),
        memory=dict(own[-1].get("memory") or {}),
        ranks=_newest(own, "ranks"),
        traffic=_newest(own, "bytes"),
        experts=_newest(own, "experts"),
    )


def figures_of_run(place: RunDir) -> TrainingFigures | None:
    """Return the figures of the newest attempt that has trained; None without one or if its files cannot be read."""
    try:
        for attempt in reversed(place.all_attempts()):
            if lines := _newest_lines(attempt):
                return training_figures(lines, _world_size(place, attempt))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return None


def figures_json(figures: TrainingFigures | None) -> dict[str, Any] | None:
    """Return the figures as plain JSON data."""
    return None if figures is None else asdict(figures)


def figures_words(figures: TrainingFigures | None) -> dict[str, str]:
    """Return the lines of `orch show` by their labels, without shares below half a percent."""
    if figures is None:
        return {}
    speed = figures.tokens_per_s_per_rank
    words = [f"{count(round(speed))} tokens/s per rank"] if speed is not None else []
    words += [f"{figures.tflops_per_rank:.3g} TFLOP/s per rank"] if figures.tflops_per_rank is not None else []
    words += [f"MFU {100 * figures.mfu:.1f} %"] if figures.mfu is not None else []
    shares = {name: share for name, share in figures.shares.items() if share >= _LEAST_SHARE}
    parts = [f"{name} {100 * share:.0f} %{_waits(name, figures.exposed)}" for name, share in shares.items()]
    peaks = [f"{name} {size(peak)}" for name, peak in figures.memory.items()]
    steps = f"median of {figures.steps} steps" if figures.steps > 1 else "one step"
    return {
        "speed": "   ".join([*words, f"({steps})"]) if words else "",
        "time": f"{', '.join(parts)} of a step of rank 0" if parts else "",
        "memory": f"{', '.join(peaks)} at most on rank 0" if peaks else "",
        "ranks": _slowest(figures.ranks),
        "bubble": _bubble(figures.ranks),
        "traffic": f"{', '.join(_traffic(figures.traffic))} in each step of rank 0" if figures.traffic else "",
        "experts": _experts(figures.experts),
    }


def _exposed_shares(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return shares of a step by kind of communication; each line has the communication of the step before it.

    Empty for lines of older releases.
    """
    pairs = [(before["seconds"], line["exposed"]) for before, line in pairwise(lines) if line.get("exposed")]
    known = [{**exposed, "": seconds} for seconds, exposed in pairs if seconds]
    names = [name for name in _COMMUNICATION if known and name in known[-1]]
    return {name: median(one.get(name, 0.0) / one[""] for one in known) for name in names}


def _waits(name: str, exposed: Mapping[str, float]) -> str:
    """Return the known parts of `waiting`; empty for other names."""
    told = [f"{words} {100 * exposed[kind]:.0f} %" for kind, words in _COMMUNICATION.items() if kind in exposed]
    return f" ({', '.join(told)})" if name == "waiting" and told else ""


def _slowest(ranks: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the rank with the most work in each relevant section, relative to the median."""
    told = {name: one for name, one in ranks.items() if name in _SECTIONS and one["median"] >= _LEAST_SECONDS}
    parts = [f"{name} rank {one['rank']:.0f} ({one['most'] / one['median']:.2f} x)" for name, one in told.items()]
    return f"slowest, beside the median of all: {', '.join(parts)}" if parts else ""


def _bubble(ranks: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the share of a step that pipeline ranks wait for other stages; empty without a pipeline."""
    if (found := ranks.get("bubble")) is None:
        return ""
    shares = f"{100 * found['least']:.0f} to {100 * found['most']:.0f} %"
    return f"ranks wait {shares} of a step for other stages, rank {found['rank']:.0f} most"


def _traffic(traffic: Mapping[str, int]) -> list[str]:
    return [f"{name} {size(total)}" for name, total in traffic.items()]


def _experts(experts: Mapping[str, float]) -> str:
    """Describe the imbalance of tokens between experts."""
    if not experts:
        return ""
    whose = f"expert {experts['expert']:.0f} of layer {experts['layer']:.0f}"
    return f"{experts['least']:.2f} to {experts['most']:.2f} x the mean tokens of their layer, most {whose}"


def _newest(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the value of the newest line that has it; empty for lines of older releases."""
    return next((dict(line[key]) for line in reversed(lines) if line.get(key)), {})


def _newest_lines(attempt: AttemptDir) -> list[dict[str, Any]]:
    start = max(0, file_size(attempt.metrics) - RECENT_STEPS * _LINE_BYTES)
    found = (_fields(line) for line in read_new_lines(attempt.metrics, start)[0])
    return [line for line in found if line is not None]


def _fields(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it was torn by a kill or begins before the part that is read."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "step" in found else None


def _world_size(place: RunDir, attempt: AttemptDir) -> int:
    return load(place, attempt.number).cluster.world_size


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return median(known) if known else None
