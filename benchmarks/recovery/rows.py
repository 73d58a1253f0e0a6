"""Rows of the table: figures, their faults and targets, and printing."""

import math
from dataclasses import dataclass
from typing import Any

STRETCH, MUST, MISSED, FAILED = "stretch", "must", "MISSED", "FAILED"


@dataclass(frozen=True, kw_only=True)
class RecoveryRow:
    """A row of the table; less is better."""

    name: str
    text: str
    must: float
    stretch: float
    fault: str
    """Key of `faults.FAULTS` that yields the figure."""
    figure: str
    unit: str = "s"

    def verdict(self, value: float) -> str:
        """Return the best target that the value meets."""
        return STRETCH if value <= self.stretch else MUST if value <= self.must else MISSED


COMPARED = frozenset({"step-time", "step-cpu"})
"""Rows that are small differences of two large figures, possibly negative; printed with the range of rounds."""


def _row(name: str, text: str, bounds: tuple[float, float], where: str, unit: str = "s") -> RecoveryRow:
    fault, _, figure = where.partition(":")
    return RecoveryRow(name=name, text=text, must=bounds[0], stretch=bounds[1], fault=fault, figure=figure, unit=unit)


ROWS = (
    _row("kill-noticed", "SIGKILL of a rank -> noticed", (0.3, 0.1), "kill:noticed"),
    _row("kill-back", "noticed -> first new step (warm, RAM tier)", (3.0, 1.5), "kill:back"),
    _row("kill-share", "the same as a share of the cold start", (0.35, 0.15), "kill:share", "x"),
    _row("stop-declared", "SIGSTOP -> hang declared, culprit named, evidence kept", (10.0, 5.0), "stop:declared"),
    _row("spare-back", "node lost, known -> first new step on a spare", (10.0, 5.0), "spare:back"),
    _row("step-time", "step time, 2x2 run with all on / bare loop", (1.01, 1.005), "monitoring:ratio", "x"),
    _row("step-cpu", "CPU added per step and rank, agents included", (300e-6, 50e-6), "monitoring:cpu", "us"),
    _row("scale-cpu", "coordinator of 10,000 ranks: CPU of one core", (0.30, 0.10), "scale:cpu", "%"),
    _row("scale-verdict", "10,000 ranks: limit over -> verdict", (2.0, 1.0), "scale:verdict"),
)


_HEAD = ("row", "ours", "must", "stretch", "verdict", "n", "others")
_WIDTHS = (max(len(row.text) for row in ROWS), 9, 9, 9, 7, 6, 6)


def head(report: dict[str, Any]) -> str:
    """Return the machine and the column names."""
    machine = (
        f"{report['cores']} cores, torch {report['torch']}, Python {report['python']}, load before "
        f"{report['load']:.2f}; {report['cluster']} scheduler, 2 nodes x 2 ranks; medians of n rounds, sides in turn"
    )
    return "\n".join([machine, "", _align(_HEAD), _align(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """Return one row."""
    others = "; ".join(
        f"{name} {_value(one['value'], row['unit'])} (n = {_count(one)})" for name, one in row["others"].items()
    )
    bounds = (_value(row[key], row["unit"]) for key in ("ours", "must", "stretch"))
    return _align((row["text"], *bounds, row["verdict"], _count(row), others or "-"))


def notes(report: dict[str, Any]) -> str:
    """Return the problems of all rounds."""
    return "\n".join(["", *dict.fromkeys(note for row in report["rows"] for note in _notes(row))])


def _notes(row: dict[str, Any]) -> list[str]:
    counted = {"wrong": "another rank was named", "unkept": "the evidence was not on disk when it was declared"}
    told = [f"{row['text']}: {text} in {row[key]} of {row['rounds']}" for key, text in counted.items() if row[key]]
    told += [f"{row['text']}: {name}: {problem}" for name, problem in row["problems"].items()]
    if row["row"] in COMPARED:
        least, most = (_value(bound(row["values"]), row["unit"]) for bound in (min, max))
        told.append(f"{row['text']}: rounds from {least} to {most}; a median says nothing finer than they scatter")
    return told


def _count(told: dict[str, Any]) -> str:
    """Return the number of rounds, with the number of good ones if some were not."""
    return str(told["rounds"]) if told["good"] == told["rounds"] else f"{told['good']} of {told['rounds']}"


def _value(value: float, unit: str) -> str:
    if math.isinf(value):
        return "never"
    if unit == "s":
        return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
    scale, name = {"us": (1e6, "us"), "%": (100.0, "%"), "x": (1.0, "x")}[unit]
    return f"{value * scale:.{3 if unit == 'x' else 1}f} {name}"


def _align(cells: tuple[str, ...]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells[1:-1], _WIDTHS[1:-1], strict=True)]
    return "  ".join([cells[0].ljust(_WIDTHS[0]), *padded, cells[-1]]).rstrip()
