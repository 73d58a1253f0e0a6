"""Restore tests as tables and JSON."""

import time
from collections.abc import Sequence
from typing import Any

from orchestrator.cli.terminal.render import Column, Screen, count, iso, size, span
from orchestrator.errors import CheckpointInvalid, Precondition
from orchestrator.registry.records import RestoreTest
from trainer.contract.restore_test import FOUND_BAD, Outcome


def told(test: RestoreTest) -> dict[str, Any]:
    """One test as plain JSON."""
    return {
        "test": test.test, "run": test.run, "checkpoint": test.checkpoint, "step": test.step, "layout": test.layout,
        "begun_at": iso(test.begun_at), "ended_at": iso(test.ended_at), "verdict": test.verdict or None,
        "reason": test.reason, "forced": bool(test.forced), "evidence": test.evidence,
    }  # fmt: skip


def exit_code(tests: Sequence[RestoreTest]) -> int:
    """0 when all were restored, 7 for a bad checkpoint, else that of what could not be done."""
    verdicts = {test.verdict for test in tests}
    if verdicts & FOUND_BAD:
        return CheckpointInvalid.exit_code
    return 0 if verdicts <= {Outcome.RESTORED} else Precondition.exit_code


def show_verdict(screen: Screen, test: RestoreTest) -> None:
    """A verdict with its evidence, in a few lines."""
    screen.say(f"step {test.step} of {test.run} on {test.layout}: {test.verdict}")
    screen.say(f"  {test.reason}")
    found = test.evidence
    times = [f"{name} {span(found[key])}" for name, key in _TIMES if isinstance(found.get(key), (int, float))]
    if isinstance(found.get("bytes_per_second"), (int, float)):
        times.append(f"read at {size(found['bytes_per_second'])}/s")
    if times:
        screen.say(f"  {', '.join(times)}")
    for note in found.get("notes", ()):
        screen.note(f"  {note}")
    screen.note(f"  more:  orch show {test.test}")


_TIMES = (
    ("verified in", "verify_seconds"),
    ("restored in", "restore_seconds"),
    ("job start to first step", "rto_seconds"),
)


def _rounded(value: Any, digits: int) -> float | None:
    return round(value, digits) if isinstance(value, (int, float)) else None


def _rate(value: float | None) -> str:
    return f"{size(value)}/s" if value else ""


def show_tests(screen: Screen, tests: Sequence[RestoreTest], *, with_run: bool = True) -> None:
    """One line for each test."""
    now = time.time()
    rows = [
        {
            "run": test.run, "step": test.step, "layout": test.layout, "verdict": test.verdict or "under way",
            "age": now - (test.ended_at or test.begun_at), "at": iso(test.ended_at or test.begun_at),
            "rto": _rounded(test.evidence.get("rto_seconds"), 2),
            "rate": _rounded(test.evidence.get("bytes_per_second"), 0),
            "compared": test.evidence.get("compared"), "test": test.test, "reason": test.reason,
        }
        for test in tests
    ]  # fmt: skip
    columns = [
        *([Column("RUN", "run")] if with_run else []),
        Column("STEP", "step", count, right=True),
        Column("LAYOUT", "layout"),
        Column("VERDICT", "verdict"),
        Column("AGE", "age", span) if screen.terminal else Column("AT", "at"),
        Column("RTO", "rto", span, right=True),
        Column("RATE", "rate", _rate, right=True, drop_order=2),
        Column("STEPS", "compared", right=True, drop_order=1),
        Column("TEST", "test", drop_order=3),
        Column("WHY", "reason"),
    ]
    screen.table(columns, rows)
