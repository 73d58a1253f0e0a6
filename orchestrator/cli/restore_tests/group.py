"""`orch restore-tests`: the tests, the due ones, and a pass that starts them."""

import time
from collections.abc import Sequence
from typing import Any

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Column, Screen, count, iso, size, span
from orchestrator.errors import CheckpointInvalid, Precondition
from orchestrator.home import registry_path
from orchestrator.registry.records import RestoreTest
from trainer.protocol.restore_test import FOUND_BAD, Outcome


def restore_test_json(test: RestoreTest) -> dict[str, Any]:
    """Return a test as plain JSON data."""
    return {
        "test": test.test, "run": test.run, "checkpoint": test.checkpoint, "step": test.step, "layout": test.layout,
        "begun_at": iso(test.begun_at), "ended_at": iso(test.ended_at), "verdict": test.verdict or None,
        "reason": test.reason, "forced": bool(test.forced), "evidence": test.evidence,
    }  # fmt: skip


def exit_code(tests: Sequence[RestoreTest]) -> int:
    """Return 0 if all were restored, 7 for a bad checkpoint, otherwise the code of a failed precondition."""
    verdicts = {test.verdict for test in tests}
    if verdicts & FOUND_BAD:
        return CheckpointInvalid.exit_code
    return 0 if verdicts <= {Outcome.RESTORED} else Precondition.exit_code


def show_verdict(screen: Screen, test: RestoreTest) -> None:
    """Print a verdict with its evidence in a few lines."""
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


def _round_number(value: Any, digits: int) -> float | None:
    return round(value, digits) if isinstance(value, (int, float)) else None


def _rate(value: float | None) -> str:
    return f"{size(value)}/s" if value else ""


def show_tests(screen: Screen, tests: Sequence[RestoreTest], *, with_run: bool = True) -> None:
    """Print one line per test."""
    now = time.time()
    rows = [
        {
            "run": test.run, "step": test.step, "layout": test.layout, "verdict": test.verdict or "under way",
            "age": now - (test.ended_at or test.begun_at), "at": iso(test.ended_at or test.begun_at),
            "rto": _round_number(test.evidence.get("rto_seconds"), 2),
            "rate": _round_number(test.evidence.get("bytes_per_second"), 0),
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


@click.group("restore-tests", cls=Noun, of_a_run="history")
def restore_tests() -> None:
    """List restore tests of checkpoints, and which are due.

    `restore_tests` in a run's configuration sets how often its checkpoints are restored, and on which layouts
    (docs/restore-tests.md).
    """


@restore_tests.command("ls", json_data="as ckpt restore-test")
@click.pass_obj
def ls(screen: Screen) -> None:
    """List the newest test of every run, and all running tests."""
    with open_store(readonly=True) as store:
        every = store.restore_tests()
    newest = {test.run: test for test in every}
    shown = [test for test in reversed(every) if test.ended_at is None or newest[test.run] is test]
    _show(screen, "restore-tests.ls", shown, "no restore test yet: `orch restore-tests due` says when one is")


@restore_tests.command("history", json_data="as ckpt restore-test")
@click.argument("run", required=False)
@click.pass_obj
def history(screen: Screen, run: str | None) -> None:
    """List every restore test of a run, or of all runs, newest first.

    RTO is the recovery time, from the start of the job to the first step. RATE is the speed at which the restore
    read. STEPS is the number of steps that were compared.
    """
    with open_store(readonly=True) as store:
        name = store.run(run).name if run is not None else None
        every = store.restore_tests(name)[::-1]
    _show(screen, "restore-tests.history", every, f"no restore test{f' of {name}' if name else ''} yet")


def _show(screen: Screen, verb: str, tests: list[Any], nothing: str) -> None:
    if screen.json:
        screen.data(verb, [restore_test_json(test) for test in tests])
        return
    show_tests(screen, tests)
    if not tests:
        screen.note(nothing)


DUE_JSON = "list of {run, step, checkpoint, layout, why, due_at, in, refused}; in is in seconds, negative if overdue"


@restore_tests.command("due", json_data=DUE_JSON)
@click.pass_obj
def due(screen: Screen) -> None:
    """List the next test of every run, its time, and what holds it back."""
    from orchestrator.restore_tests.controller_pass import RestoreTests
    from orchestrator.run_dirs.bounded_files import DirectFiles

    now = time.time()
    with open_store(readonly=True) as store:
        found = RestoreTests(store, DirectFiles(), lambda run: True).due(now)
    rows: list[dict[str, Any]] = [
        {
            "run": one.run, "step": one.step, "checkpoint": one.checkpoint, "layout": one.layout, "why": one.why,
            "due_at": iso(one.at), "in": one.at - now, "refused": one.refused or None,
        }
        for one in found
    ]  # fmt: skip
    if screen.json:
        screen.data("restore-tests.due", rows)
        return
    columns = [
        Column("RUN", "run"),
        Column("STEP", "step", count, right=True),
        Column("LAYOUT", "layout"),
        Column("DUE", "when"),
        Column("WHY", "why"),
        Column("HELD BACK", "refused"),
    ]
    screen.table(columns, [{**row, "when": f"in {span(row['in'])}" if row["in"] > 0 else "now"} for row in rows])
    if not rows:
        screen.note("nothing is due: no run has a checkpoint to test, or restore_tests.every is off")


@restore_tests.command("run")
@click.option("--due", "only_due", is_flag=True, required=True, help="Begin what is due.")
@click.option("--force", is_flag=True, help="Begin the next test of every run, regardless of schedule and budget.")
@click.pass_obj
def run(screen: Screen, only_due: bool, force: bool) -> int:
    """Begin the tests that are due, in one controller pass from here, for cron.

    A live controller begins due tests automatically. With --force the next test of every run is due now; as many
    begin as `restore_tests.max_parallel` allows.
    """
    from orchestrator.controller import service
    from orchestrator.scheduler.available_schedulers import kinds

    reports = {kind: service.tick_once(registry_path(), kind, force_tests=force) for kind in kinds()}
    lines = [line for report in reports.values() if report is not None for line in report.actions]
    if screen.json:
        screen.data(
            "restore-tests.run",
            {"acted": sorted(kind for kind, report in reports.items() if report is not None), "actions": lines},
        )
        return 0
    for line in lines:
        screen.say(line)
    for kind, report in reports.items():
        if report is None:
            screen.note(f"{kind}: a controller lives, and begins what is due by itself")
    if not lines and all(report is not None for report in reports.values()):
        screen.note("nothing is due: `orch restore-tests due` says what is next")
    return 0
