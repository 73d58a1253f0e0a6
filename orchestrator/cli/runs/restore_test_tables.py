"""Restore tests in `orch show`: what is proven of a run's checkpoints, its newest tests, and what one has compared."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.cli.checkpoints.tested_layouts import Proven, newest_proven
from orchestrator.cli.restore_tests.tables import told
from orchestrator.cli.terminal.render import Column, Screen, count, iso, size, span
from orchestrator.registry.records import Checkpoint, Copy, RestoreTest
from orchestrator.states import Trust
from trainer.contract.restore_test import Outcome

SHOWN = 5
UNDER_WAY = "under way"
Row = dict[str, Any]


def proven_of(tests: Sequence[RestoreTest], checkpoints: Sequence[Checkpoint], copies: Sequence[Copy]) -> Proven | None:
    """The newest proven checkpoint among those that are kept somewhere."""
    copied = {copy.name for copy in copies}
    gone = {item.name for item in checkpoints if item.trust is Trust.DELETED and item.name not in copied}
    known = [item for item in checkpoints if item.trust is not Trust.CORRUPT and item.name not in gone]
    return newest_proven(tests, {item.name: item.committed_at for item in known})


def restore_tests_json(tests: Sequence[RestoreTest], proven: Proven | None, own: RestoreTest | None) -> Row:
    """Tests of a run's checkpoints, newest first; what they prove; and the test that the run itself is."""
    return {
        "restore_tests": [told(test) for test in reversed(tests)],
        "proven": {**asdict(proven), "ended_at": iso(proven.ended_at)} if proven else None,
        "is_restore_test": told(own) if own else None,
    }


def say_restore_tests(screen: Screen, run: str, tests: Sequence[RestoreTest], proven: Proven | None) -> None:
    """The newest tests of a run's checkpoints, and what they prove."""
    if tests:
        screen.say("\nrestore tests")
        screen.table(TESTS, [_row(test, time.time()) for test in tests[: -SHOWN - 1 : -1]], aligned=True)
    if len(tests) > SHOWN:
        screen.note(f"{len(tests) - SHOWN} more:  orch restore-tests history {run}")
    screen.say(("" if tests else "\n") + _proven_words(tests, proven))


def _proven_words(tests: Sequence[RestoreTest], proven: Proven | None) -> str:
    if proven is not None:
        ago = span(time.time() - proven.ended_at)
        return f"newest proven restorable: step {count(proven.step)}, {ago} ago, on {', '.join(proven.layouts)}"
    if any(test.verdict == Outcome.RESTORED for test in tests):
        return "no checkpoint that is there now, and good, has been restored by a test"
    return "no checkpoint of it has been restored by a test"


def _row(test: RestoreTest, now: float) -> Row:
    found = test.evidence
    return {
        "step": test.step, "layout": test.layout, "verdict": test.verdict or UNDER_WAY, "reason": test.reason,
        "age": now - (test.ended_at or test.begun_at), "rto": found.get("rto_seconds"),
        "rate": found.get("bytes_per_second"), "compared": found.get("compared"),
    }  # fmt: skip


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{size(rate)}/s"


TESTS = [
    Column("STEP", "step", count, right=True),
    Column("LAYOUT", "layout"),
    Column("VERDICT", "verdict"),
    Column("AGE", "age", span, right=True),
    Column("RTO", "rto", span, right=True),
    Column("RATE", "rate", _rate, right=True, drop_order=1),
    Column("COMPARED", "compared", right=True, drop_order=2),
    Column("WHY", "reason"),
]


def own_lines(test: RestoreTest) -> dict[str, str]:
    """What a run that is a restore test says of itself in its head."""
    return {
        "tests": f"step {count(test.step)} of {test.run} on {test.layout}   {test.checkpoint}",
        "verdict": f"{test.verdict or UNDER_WAY}" + (f"   {test.reason}" if test.reason else ""),
    }


def compared_table(screen: Screen, test: RestoreTest) -> None:
    """The steps that a restore test has trained, each beside the run's own."""
    recorded = test.evidence.get("run_steps") or {}
    rows = [_compared(step, recorded.get(str(step["step"])) or []) for step in test.evidence.get("steps") or ()]
    if rows:
        screen.say("")
        screen.table(COMPARED, rows, aligned=True)


def _compared(step: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> Row:
    """A step with the most alike of the run's own: a run may have trained it more than once."""
    nearest = min(recorded, key=lambda own: _distance(own.get("loss"), step.get("loss")), default={})
    return {**step, **{f"run_{name}": value for name, value in nearest.items()}}


def _distance(one: Any, other: Any) -> float:
    """How far apart two losses are; words (nan, inf) are alike, or as far as can be."""
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    found = abs(one - other) if numbers else 0.0 if one == other else float("inf")
    return found if found == found else float("inf")


def _digits(number: Any) -> str:
    return f"{number:.7g}" if isinstance(number, (int, float)) else str("-" if number is None else number)


COMPARED = [
    Column("STEP", "step", count, right=True),
    Column("LOSS", "loss", _digits, right=True),
    Column("RUN'S LOSS", "run_loss", _digits, right=True),
    Column("GRAD NORM", "grad_norm", _digits, right=True),
    Column("RUN'S NORM", "run_grad_norm", _digits, right=True),
    Column("LR", "lr", _digits, right=True, drop_order=1),
    Column("RUN'S LR", "run_lr", _digits, right=True, drop_order=1),
]
