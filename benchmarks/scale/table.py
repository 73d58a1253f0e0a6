"""The printed lines."""

import math
from typing import Any

MUST = {"cpu": 0.10, "verdict": 1.0}
STRETCH = {"cpu": 0.05, "verdict": 0.5}


def report(found: dict[str, Any]) -> str:
    """Return the whole result."""
    lines = [
        f"{found['ranks']} synthetic ranks behind {found['nodes']} agents, {found['cores']} cores, "
        f"steps of {found['step']:g} s, {found['seconds']:g} s of steady state; all had joined and were ready after "
        f"{found['joined']:.1f} s; {found['reports_a_second']:.0f} reports a second, "
        f"{1e6 * found['rows'][0]['value'] / max(1.0, found['reports_a_second']):.0f} us of CPU each",
        "",
        f"{'row':<34} {'ours':>8} {'must':>8} {'stretch':>8}  verdict",
    ]
    lines += [_line(row) for row in found["rows"]]
    lines += ["", *(_said(verdict) for verdict in found["verdicts"])]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    kept = "stretch" if row["value"] <= row["stretch"] else "must" if row["value"] <= row["must"] else "MISSED"
    if row["good"] < row["rounds"]:
        kept = f"FAILED: right in {row['good']} of {row['rounds']}, another rank named in {row['wrong']}"
    cells = [_value(row["row"], row[key]) for key in ("value", "must", "stretch")]
    return f"{row['row']:<34} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8}  {kept}"


def _value(row: str, value: float) -> str:
    return f"{100 * value:.1f} %" if "CPU" in row else "never" if math.isinf(value) else f"{value:.2f} s"


def _said(verdict: dict[str, Any]) -> str:
    if math.isinf(verdict["after"]):
        return f"{verdict['kind']}: NO VERDICT in time"
    right = (
        "the right rank" if verdict["right"] else f"THE WRONG RANK, {verdict['named']} instead of {verdict['rank']},"
    )
    told = f"told with its evidence {verdict['after']:.1f} s after it stopped, {verdict['limit']:.1f} s allowed"
    return f"{verdict['kind']}: {right} named; {told}"
