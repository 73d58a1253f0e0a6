"""The table that people read."""

import math
from typing import Any

from benchmarks.recovery.rows import COMPARED, MISSED, ROWS

_HEAD = ("row", "ours", "must", "stretch", "verdict", "n", "others")
_WIDTHS = (max(len(row.text) for row in ROWS), 9, 9, 9, 7, 6, 6)


def head(report: dict[str, Any]) -> str:
    """The machine and the names of the columns."""
    machine = (
        f"{report['cores']} cores, torch {report['torch']}, Python {report['python']}, load before "
        f"{report['load']:.2f}; {report['cluster']} scheduler, 2 nodes x 2 ranks; medians of n rounds, sides in turn"
    )
    return "\n".join([machine, "", _aligned(_HEAD), _aligned(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """One row."""
    others = "; ".join(
        f"{name} {_value(one['value'], row['unit'])} (n = {_count(one)})" for name, one in row["others"].items()
    )
    bounds = (_value(row[key], row["unit"]) for key in ("ours", "must", "stretch"))
    return _aligned((row["text"], *bounds, row["verdict"], _count(row), others or "-"))


def notes(report: dict[str, Any]) -> str:
    """What went wrong, and why rows are missed."""
    return "\n".join(["", *dict.fromkeys(note for row in report["rows"] for note in _notes(row))])


def _notes(row: dict[str, Any]) -> list[str]:
    counted = {"wrong": "another rank was named", "unkept": "the evidence was not on disk when it was declared"}
    told = [f"{row['text']}: {text} in {row[key]} of {row['rounds']}" for key, text in counted.items() if row[key]]
    told += [f"{row['text']}: {name}: {problem}" for name, problem in row["problems"].items()]
    if row["row"] in COMPARED:
        least, most = (_value(bound(row["values"]), row["unit"]) for bound in (min, max))
        told.append(f"{row['text']}: rounds from {least} to {most}; a median says nothing finer than they scatter")
    return told + [f"{row['text']}: missed because {row['reason']}"] * (row["verdict"] == MISSED)


def _count(told: dict[str, Any]) -> str:
    """Rounds; when not all of them came to the figure, how many did."""
    return str(told["rounds"]) if told["good"] == told["rounds"] else f"{told['good']} of {told['rounds']}"


def _value(value: float, unit: str) -> str:
    if math.isinf(value):
        return "never"
    if unit == "s":
        return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
    scale, name = {"us": (1e6, "us"), "%": (100.0, "%"), "x": (1.0, "x")}[unit]
    return f"{value * scale:.{3 if unit == 'x' else 1}f} {name}"


def _aligned(cells: tuple[str, ...]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells[1:-1], _WIDTHS[1:-1], strict=True)]
    return "  ".join([cells[0].ljust(_WIDTHS[0]), *padded, cells[-1]]).rstrip()
