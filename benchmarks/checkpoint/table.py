"""The printed table."""

import math
from typing import Any

from benchmarks.checkpoint.rows import MISSED, ROWS

_HEAD = ("row", "ours", "limit", "ratio", "must", "stretch", "verdict", "best other", "its ratio", "cache", "thr", "n")
_WIDTHS = (max(len(row.text) for row in ROWS), 9, 9, 6, 6, 7, 7, 22, 9, 8, 3, 2)
"""Fixed, because the full table takes a quarter of an hour and each row is printed once measured."""


def head(report: dict[str, Any]) -> str:
    """Return the machine and the column names."""
    return "\n".join([_machine(report), "", _align(_HEAD), _align(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """Return one row."""
    return _align(_cells(row))


def notes(report: dict[str, Any]) -> str:
    """Return remarks on single rows."""
    return "\n".join(["", *(said for row in report["rows"] if (said := _format_note(row)))])


def _machine(report: dict[str, Any]) -> str:
    return (
        f"{report['cores']} cores ({report['cpu']}), {report['file_system']}, torch {report['torch']}, "
        f"Python {report['python']}, load before {report['load']:.2f}\n"
        "ours / limit where less is better, limit / ours where more is; medians, interleaved limit-ours-limit-others "
        "in both orders; n rounds"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["text"], *["-"] * 5, "FAILED", *["-"] * 5)
    best = row["best_other"]
    return (
        row["text"], _value(row["ours"], row["unit"]), _value(row["limit"], row["unit"]), _ratio(row["ratio"]),
        _bound(row["must"], row), _bound(row["stretch"], row), row["verdict"],
        "-" if best is None else best["name"], "-" if best is None else _ratio(best["ratio"]), row["cache"],
        str(row["threads"]), str(row["rounds"]),
    )  # fmt: skip


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1000 * value:.1f} ms" if value < 10 else f"{value:.1f} s"
    return f"{value / (1 << 20):.1f} MiB" if unit == "MiB" else f"{value:g}"


def _ratio(value: float) -> str:
    return "fails" if math.isinf(value) or value == 0 else f"{value:.2f}"


def _bound(bound: float | None, row: dict[str, Any]) -> str:
    return "-" if bound is None else f"{'<=' if row['at_most'] else '>='}{bound:g}"


def _format_note(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['text']}: FAILED: {row['error']}"
    asked = [f"{what}: {'yes' if holds else 'NO'}" for what, holds in row["demands"]]
    parts = [part for part in (*asked, row["note"]) if part]
    if row["verdict"] == MISSED:
        parts.append(f"missed because {row['reason']}")
    return f"{row['text']}: {'; '.join(parts)}" if parts else ""


def _align(cells: tuple[str, ...]) -> str:
    first, *rest = (
        cell.ljust(width) if not at else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
