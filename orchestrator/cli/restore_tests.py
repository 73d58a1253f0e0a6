"""`orch ckpt restore-test` and `orch restore-tests`: start restore tests, list them, and show what they prove."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.terminal.command_classes import Noun, Verb
from orchestrator.cli.terminal.render import Column, Screen, count, iso, size, span
from orchestrator.config.restore_tests_config import SAME
from orchestrator.errors import CheckpointInvalid, ConfigError, NotFound, Precondition
from orchestrator.home import registry_path
from orchestrator.registry.records import Checkpoint, RestoreTest, Run
from orchestrator.states import Trust
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.restore_test import FOUND_BAD, UNDECIDED, Outcome

LOOK_EVERY = 0.5
"""Seconds between checks for verdicts."""


RESTORE_TEST_JSON = """
list of {test, run, checkpoint, step, layout, begun_at, ended_at, verdict, reason, forced, evidence}; verdict is null
until it is known; evidence has, if the test got that far, ranks, level, place, bytes, verify_seconds, restore_seconds,
bytes_read, bytes_per_second, rto_seconds, seconds, compared, exact, bounds, largest_difference, steps, run_steps,
other_software, notes
"""


@click.command("restore-test", cls=Verb, json_data=RESTORE_TEST_JSON)
@click.argument("target", metavar="RUN[@STEP]")
@click.option(
    "--layout", "layouts", metavar="LAYOUT,...",
    help="One test for each: same, RANKS (1) or NODESxRANKS (2x4). Default: restore_tests.layouts.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1, 1000), metavar="N", help="Number of steps to train and compare.")
@click.option("--level", type=click.IntRange(2, 4), metavar="N", help="First verify it at this level.")
@click.option("--tier", help="Path of the tier whose copy is tested; `run` is the run's own folder.")
@click.option("--wait", "wait_", is_flag=True, help="Wait for the verdict.")
@click.option("--local", is_flag=True, help="Run the test on this machine, not on the cluster.")
@click.option("--no-controller", is_flag=True, help="Start no controller: launch from here and return.")
@click.pass_obj
def restore_test(
    screen: Screen, target: str, layouts: str | None, steps: int | None, level: int | None, tier: str | None,
    wait_: bool, local: bool, no_controller: bool,
) -> int:  # fmt: skip
    """Restore a checkpoint in a separate job, train a few steps from it, and compare them with the run's own.

    Without @STEP the newest checkpoint is tested. Nothing is written to the tested run. Budget and schedule
    (`restore_tests` in the run's configuration) do not apply here. docs/restore-tests.md explains the verdicts.

    With --wait the exit code is 0 for RESTORED, 7 for SUSPECT or CORRUPT, 4 for NOT_COMPARABLE or NOT_FINISHED. It
    is also 4 if no job can reach the checkpoint.
    """
    from orchestrator.restore_tests.controller_pass import begin_test
    from orchestrator.restore_tests.create import RestoreTestRequest, check_test
    from orchestrator.run_dirs.bounded_files import DirectFiles
    from orchestrator.scheduler.available_schedulers import resolve

    if wait_ and no_controller:
        what = "--wait needs a controller to finish the test"
        raise ConfigError(what, where="--no-controller", hint="leave one of the two out")
    chosen = _parse_layouts(layouts)
    with open_store() as store:
        run, row = _find_checkpoint(screen, store, target)
        wanted = chosen or store.config(run.config_digest).get("restore_tests", {}).get("layouts") or [SAME]
        kind = LOCAL if local else ""
        requests = [
            RestoreTestRequest(checkpoint=row, layout=each, steps=steps, level=level, tier=tier, kind=kind, forced=True)
            for each in wanted
        ]
        for request in requests:
            check_test(store, run, request)  # check every test before the first one begins
        started = time.time()
        screen.if_interrupted = lambda: _interrupt_message(run, started)
        begun = [begin_test(store, DirectFiles(), run, request, time.time()) for request in requests]
        for cluster in sorted({resolve(kind or run.cluster), run.cluster}):  # the run's controller records the verdict
            wake_controller(screen, cluster, no_controller=no_controller)
        if wait_:
            begun = _await_verdicts(screen, store, begun)
    if screen.json:
        screen.data("ckpt.restore-test", [restore_test_json(test) for test in begun])
    elif wait_:
        for test in begun:
            _show_verdict(screen, test)
    else:
        for test in begun:
            screen.say(f"{test.test}: restores step {test.step} of {test.run} on {test.layout}")
        screen.note(f"  verdict:  orch restore-tests history {run.name}")
    return _exit_code(begun) if wait_ else 0


def _interrupt_message(run: Run, started: float) -> str:
    with open_store(readonly=True) as store:
        begun = [test.test for test in store.restore_tests(run.name, going_on=True) if test.begun_at >= started]
    if not begun:
        return "interrupted: no restore test was started, or all have ended"
    return f"detached: {', '.join(begun)} continue{'s' * (len(begun) == 1)}\n  orch restore-tests history {run.name}"


def _find_checkpoint(screen: Screen, store: Any, target: str) -> tuple[Run, Checkpoint]:
    """Return a checkpoint's run and its registry row; a folder that is not registered yet gets a new row."""
    from orchestrator.cli.checkpoints.target import find_one, saving_run, split_target

    if "/" in target:
        raise ConfigError(
            "a restore test needs the run that saved the checkpoint", where=target,
            hint="write RUN or RUN@STEP; `orch ckpt verify FOLDER --level 4` reads a folder",
        )  # fmt: skip
    name, step = split_target(target)
    run = saving_run(name)
    rows = store.checkpoints(run.name)
    if store.config(run.config_digest).get("command"):
        # Only the registry lists the checkpoints of a user's own program.
        rows = [row for row in rows if row.trust is not Trust.DELETED]
        same = [row for row in rows if step in ("", "latest", str(row.step), row.name)]
        if not same:
            steps = ", ".join(str(row.step) for row in rows[:8])
            what = f"{run.name} has no checkpoint{f' of step {step}' if step else ''}"
            raise NotFound(what, where=run.run_dir, hint=f"available steps: {steps or 'none'}")
        return run, same[0]
    found = find_one(target, screen.warn)
    parts = found.parts
    assert parts is not None
    made = Checkpoint(
        run=run.name, name=found.name, step=parts.step, attempt=parts.attempt, trust=Trust.COMMITTED, bytes=0,
        path=found.path, committed_at=0.0, tier="" if found.tier in ("", "run") else found.place,
    )  # fmt: skip
    return run, next((row for row in rows if row.name == found.name), made)


def _parse_layouts(words: str | None) -> list[str]:
    from orchestrator.config.restore_tests_config import RestoreTestsConfig

    if words is None:
        return []
    found = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    try:
        if not found:
            raise ValueError("--layout: --layout names no layout")
        RestoreTestsConfig(layouts=tuple(found))
    except ValueError as error:
        raise ConfigError(str(error).partition(": ")[2], where="--layout", hint="--layout same,1,2x4") from error
    return found


def _await_verdicts(screen: Screen, store: Any, begun: list[RestoreTest]) -> list[RestoreTest]:
    started = time.monotonic()
    with screen.ticker() as ticker:
        while True:
            now = [store.restore_test(test.test) or test for test in begun]
            waiting = [test for test in now if test.ended_at is None]
            if not waiting:
                return now
            with suppress(NotFound):
                run = store.run(waiting[0].test)
                state = ", ".join(filter(None, (run.state, run.reason)))
                ticker.update(f"{run.name}: {state} ({span(time.monotonic() - started)})")
            time.sleep(LOOK_EVERY)


def _exit_code(tests: Sequence[RestoreTest]) -> int:
    verdicts = {test.verdict for test in tests}
    if verdicts & FOUND_BAD:
        return CheckpointInvalid.exit_code
    return 0 if verdicts <= {Outcome.RESTORED} else Precondition.exit_code


def _show_verdict(screen: Screen, test: RestoreTest) -> None:
    screen.say(f"step {test.step} of {test.run} on {test.layout}: {test.verdict}\n  {test.reason}")
    evidence = test.evidence
    known = [(text, show, evidence.get(key)) for key, text, show in _TIMES]
    times = [text.format(show(value)) for text, show, value in known if isinstance(value, (int, float))]
    if times:
        screen.say(f"  {', '.join(times)}")
    for note in evidence.get("notes", ()):
        screen.note(f"  {note}")
    screen.note(f"  more:  orch show {test.test}")


_TIMES = (
    ("verify_seconds", "verified in {}", span),
    ("restore_seconds", "restored in {}", span),
    ("rto_seconds", "job start to first step {}", span),
    ("bytes_per_second", "read at {}/s", size),
)


def restore_test_json(test: RestoreTest) -> dict[str, Any]:
    """Return a test as plain JSON data."""
    return {
        "test": test.test, "run": test.run, "checkpoint": test.checkpoint, "step": test.step, "layout": test.layout,
        "begun_at": iso(test.begun_at), "ended_at": iso(test.ended_at), "verdict": test.verdict or None,
        "reason": test.reason, "forced": bool(test.forced), "evidence": test.evidence,
    }  # fmt: skip


def _cells(test: RestoreTest) -> dict[str, Any]:
    moment, rto, rate = test.ended_at or test.begun_at, test.evidence.get("rto_seconds"), test.evidence.get(_RATE)
    return {
        **restore_test_json(test), "_verdict": test.verdict or "under way", "_age": time.time() - moment,
        "_at": iso(moment), "_rto": round(rto, 2) if isinstance(rto, (int, float)) else None,
        "_rate": round(rate, 0) if isinstance(rate, (int, float)) else None, "_steps": test.evidence.get("compared"),
    }  # fmt: skip


_RATE = "bytes_per_second"


def _columns(people: bool) -> list[Column]:
    return [
        Column("RUN", "run"),
        Column("STEP", "step", count, right=True),
        Column("LAYOUT", "layout"),
        Column("VERDICT", "_verdict"),
        Column("AGE", "_age", span) if people else Column("AT", "_at"),
        Column("RTO", "_rto", span, right=True),
        Column("RATE", "_rate", lambda rate: f"{size(rate)}/s" if rate else "", right=True, drop_order=2),
        Column("STEPS", "_steps", right=True, drop_order=1),
        Column("TEST", "test", drop_order=3),
        Column("WHY", "reason"),
    ]


def show_tests(screen: Screen, tests: Sequence[RestoreTest], *, of_one_run: bool = False) -> None:
    """Print one line per test. With `of_one_run`, omit the run's name, and always align the columns."""
    columns = _columns(True)[1:] if of_one_run else _columns(screen.terminal)
    screen.table(columns, [_cells(test) for test in tests], aligned=of_one_run)


@click.group("restore-tests", cls=Noun)
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
    rows = [_cells(test) for test in reversed(every) if test.ended_at is None or newest[test.run] is test]
    empty = "no restore test yet: `orch restore-tests due` shows the next ones"
    screen.listing("restore-tests.ls", _columns(screen.terminal), rows, empty=empty)


@restore_tests.command("history", json_data="as ckpt restore-test")
@click.argument("run", required=False)
@click.pass_obj
def history(screen: Screen, run: str | None) -> None:
    """List every restore test of a run, or of all runs, newest first.

    RTO is the recovery time, from the start of the job to the first step. RATE is the read speed of the
    restore. STEPS is the number of steps that were compared.
    """
    with open_store(readonly=True) as store:
        name = store.run(run).name if run is not None else None
        rows = [_cells(test) for test in reversed(store.restore_tests(name))]
    empty = f"no restore test{f' of {name}' if name else ''} yet"
    screen.listing("restore-tests.history", _columns(screen.terminal), rows, empty=empty)


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
    rows = [
        {
            "run": each.run, "step": each.step, "checkpoint": each.checkpoint, "layout": each.layout, "why": each.why,
            "due_at": iso(each.at), "in": each.at - now, "refused": each.refused or None,
            "_when": f"in {span(each.at - now)}" if each.at > now else "now",
        }
        for each in found
    ]  # fmt: skip
    columns = [
        Column("RUN", "run"),
        Column("STEP", "step", count, right=True),
        Column("LAYOUT", "layout"),
        Column("DUE", "_when"),
        Column("WHY", "why"),
        Column("HELD BACK", "refused"),
    ]
    empty = "nothing is due: no run has a checkpoint to test, or restore_tests.every is off"
    screen.listing("restore-tests.due", columns, rows, empty=empty)


@restore_tests.command("run")
@click.option("--due", "only_due", is_flag=True, required=True, help="Start the tests that are due.")
@click.option("--force", is_flag=True, help="Start the next test of every run, regardless of schedule and budget.")
@click.pass_obj
def run(screen: Screen, only_due: bool, force: bool) -> int:
    """Start the tests that are due, in one controller pass on this host. For use in cron.

    A live controller starts due tests automatically. With --force the next test of every run is due now;
    `restore_tests.max_parallel` limits how many start.
    """
    from orchestrator.controller import service
    from orchestrator.scheduler.available_schedulers import kinds

    reports = {kind: service.tick_once(registry_path(), kind, force_tests=force) for kind in kinds()}
    lines = [line for report in reports.values() if report is not None for line in report.actions]
    served = sorted(kind for kind, report in reports.items() if report is None)
    if screen.json:
        screen.data("restore-tests.run", {"acted": sorted(reports.keys() - served), "actions": lines})
        return 0
    for line in lines:
        screen.say(line)
    for kind in served:
        screen.note(f"{kind}: a controller is alive and starts due tests")
    if not (lines or served):
        screen.note("nothing is due: `orch restore-tests due` lists the next tests")
    return 0


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A checkpoint that restore tests have restored on `layouts`, most recently at `ended_at`."""

    step: int
    checkpoint: str
    layouts: tuple[str, ...]
    ended_at: float


def by_checkpoint(tests: Iterable[RestoreTest]) -> dict[str, list[RestoreTest]]:
    """Group the tests by the name of their checkpoint."""
    found: dict[str, list[RestoreTest]] = {}
    for test in tests:
        found.setdefault(test.checkpoint, []).append(test)
    return found


def _newest_by_layout(tests: Iterable[RestoreTest]) -> dict[str, RestoreTest]:
    """Map each layout to the newest of one checkpoint's tests that has a verdict."""
    finished = [test for test in tests if test.ended_at is not None and test.verdict not in UNDECIDED]
    newest = {test.layout: test for test in sorted(finished, key=_end_time)}
    return dict(sorted(newest.items(), key=lambda item: (item[0] != SAME, len(item[0]), item[0])))


def layouts_in_words(tests: Sequence[RestoreTest]) -> str:
    """Describe the tests of one checkpoint: `same, 1` if both restored it, or the failures; then running tests."""
    newest = _newest_by_layout(tests)
    bad = [f"{test.verdict} on {layout}" for layout, test in newest.items() if test.verdict != Outcome.RESTORED]
    under_way = [test.layout for test in tests if test.ended_at is None]
    words = [", ".join(bad or newest), f"under way on {', '.join(under_way)}" if under_way else ""]
    return "; ".join(filter(None, words))


def newest_proven(tests: Iterable[RestoreTest], there: Mapping[str, float]) -> Proven | None:
    """Return the newest checkpoint that a test restored. `there` maps restorable checkpoints to their commit times."""
    proven = [_proven(group) for name, group in by_checkpoint(tests).items() if name in there]
    return max(filter(None, proven), key=lambda found: (there[found.checkpoint], found.step), default=None)


def _proven(tests: list[RestoreTest]) -> Proven | None:
    """Return the layouts on which tests restored one checkpoint. CORRUPT on any layout voids all earlier restores."""
    newest = _newest_by_layout(tests).values()
    corrupt_at = max((_end_time(test) for test in newest if test.verdict == Outcome.CORRUPT), default=0.0)
    good = [test for test in newest if test.verdict == Outcome.RESTORED and _end_time(test) > corrupt_at]
    if not good:
        return None
    return Proven(
        step=good[0].step, checkpoint=good[0].checkpoint, layouts=tuple(test.layout for test in good),
        ended_at=max(map(_end_time, good)),
    )  # fmt: skip


def _end_time(test: RestoreTest) -> float:
    return test.ended_at or 0.0
