"""The table that people read."""

import math
from typing import Any

from benchmarks.recovery.rows import MISSED, ROWS

_HEAD = ("row", "ours", "must", "stretch", "verdict", "n", "others")
_WIDTHS = (max(len(row.text) for row in ROWS), 9, 9, 9, 7, 2, 6)


def head(report: dict[str, Any]) -> str:
    """The machine and the names of the columns."""
    machine = (
        f"{report['cores']} cores, torch {report['torch']}, Python {report['python']}, load before "
        f"{report['load']:.2f}; {report['cluster']} scheduler, 2 nodes x 2 ranks; medians of n rounds, sides in turn"
    )
    return "\n".join([machine, "", _aligned(_HEAD), _aligned(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """One row."""
    if "error" in row:
        return _aligned((row["text"], "-", "-", "-", "FAILED", "-", row["error"]))
    others = "; ".join(f"{name} {_value(value, row['unit'])}" for name, value in row["others"].items())
    bounds = (_value(row[key], row["unit"]) for key in ("ours", "must", "stretch"))
    return _aligned((row["text"], *bounds, row["verdict"], str(row["rounds"]), others or "-"))


def notes(report: dict[str, Any]) -> str:
    """Why rows are missed."""
    missed = [row for row in report["rows"] if row.get("verdict") == MISSED]
    return "\n".join(["", *(f"{row['text']}: missed because {row['reason']}" for row in missed)])


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
