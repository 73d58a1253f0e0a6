"""`orch ckpt restore-test`: restores a checkpoint now, in a separate job, and prints the verdict."""

import time
from contextlib import suppress
from typing import Any

import click

from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.checkpoints.target import Target, find_one, known_run
from orchestrator.cli.restore_tests.group import exit_code, restore_test_json, show_verdict
from orchestrator.cli.runs.status import restore_test_again
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, span
from orchestrator.errors import ConfigError, NotFound
from orchestrator.registry.records import Checkpoint, RestoreTest, Run
from orchestrator.states import Trust
from trainer.protocol.config_sections.scheduler_kinds import LOCAL

LOOK_EVERY = 0.5


RESTORE_TEST_JSON = """
list of {test, run, checkpoint, step, layout, begun_at, ended_at, verdict, reason, forced, evidence}; verdict is null
until it is known; evidence has, as far as the test came, ranks, level, place, bytes, verify_seconds, restore_seconds,
bytes_read, bytes_per_second, rto_seconds, seconds, compared, exact, bounds, largest_difference, steps, run_steps,
other_software, notes
"""


@click.command("restore-test", cls=Verb, json_data=RESTORE_TEST_JSON)
@click.argument("target", metavar="RUN[@STEP]")
@click.option(
    "--layout",
    "layouts",
    default=None,
    metavar="LAYOUT,...",
    help="One test for each: same, RANKS (1) or NODESxRANKS (2x4). Default: restore_tests.layouts.",
)
@click.option(
    "--steps", type=click.IntRange(1, 1000), metavar="N", default=None, help="Steps to train from it, and to compare."
)
@click.option("--level", type=click.IntRange(2, 4), metavar="N", default=None, help="Verify it at this level first.")
@click.option("--tier", default=None, help="Path of the tier whose copy is tested; `run` is the run's own folder.")
@click.option("--wait", "wait_", is_flag=True, help="Return when there is a verdict.")
@click.option("--local", is_flag=True, help="On this machine, not on the cluster.")
@click.option("--no-controller", is_flag=True, help="Start no controller: launch from here and return.")
@click.pass_obj
def restore_test(
    screen: Screen, target: str, layouts: str | None, steps: int | None, level: int | None, tier: str | None,
    wait_: bool, local: bool, no_controller: bool,
) -> int:  # fmt: skip
    """Restore a checkpoint in a separate job, train a few steps from it, and compare them with the run's own.

    Without @STEP it takes the newest one. Nothing is written to the tested run. Its budget and schedule
    (`restore_tests` in the run's configuration) do not apply here. docs/restore-tests.md explains the verdicts.

    With --wait the exit code is 0 for RESTORED, 7 for SUSPECT or CORRUPT, 4 for NOT_COMPARABLE or NOT_FINISHED. It
    is also 4 if no job can reach the checkpoint.
    """
    from orchestrator.restore_tests.controller_pass import begin_test
    from orchestrator.restore_tests.create import RestoreTestRequest, check_test
    from orchestrator.run_dirs.bounded_files import DirectFiles
    from orchestrator.scheduler.available_schedulers import resolve

    if wait_ and no_controller:
        what = "--wait needs a controller that sees the test through"
        raise ConfigError(what, where="--no-controller", hint="leave one of the two out")
    chosen = _layouts(layouts)
    with open_store() as store:
        run = _run(target)
        row = _checkpoint(screen, store, run, target)
        wanted = chosen or store.config(run.config_digest).get("restore_tests", {}).get("layouts") or ["same"]
        kind = LOCAL if local else ""
        asked = [
            RestoreTestRequest(checkpoint=row, layout=each, steps=steps, level=level, tier=tier, kind=kind, forced=True)
            for each in wanted
        ]
        for each in asked:
            check_test(store, run, each)  # all of them, before the first one begins
        started = time.time()
        screen.if_interrupted = lambda: _interrupt_message(run, started)
        begun = [begin_test(store, DirectFiles(), run, each, time.time()) for each in asked]
        for cluster in sorted({resolve(kind or run.cluster), run.cluster}):  # the run's controller records the verdict
            wake_controller(screen, cluster, no_controller=no_controller)
        if wait_:
            begun = _await_verdicts(screen, store, begun)
        if screen.json:
            screen.data("ckpt.restore-test", [restore_test_json(test) for test in begun])
        else:
            _tell(screen, begun, wait_)
    return exit_code(begun) if wait_ else 0


def _interrupt_message(run: Run, started: float) -> str:
    with open_store(readonly=True) as store:
        begun = [test.test for test in store.restore_tests(run.name, going_on=True) if test.begun_at >= started]
    if not begun:
        return "interrupted: no restore test was begun, or all have ended"
    return (
        f"detached: {', '.join(begun)} go{'es' if len(begun) == 1 else ''} on\n  orch restore-tests history {run.name}"
    )


def _run(target: str) -> Run:
    if "/" in target:
        raise ConfigError(
            "a restore test needs the run that saved the checkpoint", where=target,
            hint="write RUN or RUN@STEP; `orch ckpt verify FOLDER --level 4` reads a folder",
        )  # fmt: skip
    name, mark, step = target.rpartition("@")
    if mark and name and not step:
        raise ConfigError("no step is given after the @", where=target, hint=f"{name}@latest is the newest")
    run = known_run(name if mark and name else target)
    if (order := run.identity.get("restore_test")) is not None:
        hint = restore_test_again(order)
        raise ConfigError(f"{run.name} is a restore test itself, and saves nothing", where=target, hint=hint)
    return run


def _checkpoint(screen: Screen, store: Any, run: Run, target: str) -> Checkpoint:
    """Return the checkpoint's row in the registry, or one made from a folder that is not registered yet."""
    rows = {row.name: row for row in store.checkpoints(run.name)}
    if store.config(run.config_digest).get("command"):
        return _find_program_checkpoint(run, [row for row in rows.values() if row.trust is not Trust.DELETED], target)
    found: Target = find_one(target, screen.warn)
    if found.name in rows:
        known: Checkpoint = rows[found.name]
        return known
    from checkpointing.format.commit import parse_name

    parts = parse_name(found.name)
    assert parts is not None
    return Checkpoint(
        run=run.name, name=found.name, step=parts.step, attempt=parts.attempt, trust=Trust.COMMITTED, bytes=0,
        path=found.path, committed_at=0.0, tier="" if found.tier in ("", "run") else found.path.rpartition("/")[0],
    )  # fmt: skip


def _find_program_checkpoint(run: Run, rows: list[Checkpoint], target: str) -> Checkpoint:
    """Return a checkpoint that the user's own program wrote; only the registry knows it."""
    step = target.rpartition("@")[2] if "@" in target[1:] else ""
    same = [row for row in rows if step in ("", "latest", str(row.step), row.name)]
    if not same:
        steps = ", ".join(str(row.step) for row in rows[:8])
        raise NotFound(
            f"{run.name} has no checkpoint{f' of step {step}' if step else ''}",
            where=run.run_dir,
            hint=f"there are: {steps or 'none'}",
        )
    return same[0]


def _layouts(words: str | None) -> list[str]:
    """Parse the layouts of the option; empty without it. Raises ConfigError."""
    if words is None:
        return []
    from orchestrator.config.restore_tests_config import RestoreTestsConfig

    found = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not found:
        raise ConfigError("--layout names no layout", where="--layout", hint="--layout same,1,2x4")
    try:
        RestoreTestsConfig(layouts=tuple(found))
    except ValueError as error:
        raise ConfigError(str(error).partition(": ")[2], where="--layout", hint="--layout same,1,2x4") from error
    return found


def _await_verdicts(screen: Screen, store: Any, begun: list[RestoreTest]) -> list[RestoreTest]:
    """Wait until all tests have a verdict. Ctrl-C leaves them running."""
    started = time.monotonic()
    with screen.ticker() as ticker:
        while True:
            now = [store.restore_test(test.test) or test for test in begun]
            waiting = [test for test in now if test.ended_at is None]
            if not waiting:
                return now
            with suppress(NotFound):
                run = store.run(waiting[0].test)
                ticker.update(f"{run.name}: {run.state}, {run.reason} ({span(time.monotonic() - started)})")
            time.sleep(LOOK_EVERY)


def _tell(screen: Screen, begun: list[RestoreTest], waited: bool) -> None:
    for test in begun:
        if waited:
            show_verdict(screen, test)
        else:
            screen.say(f"{test.test}: restores step {test.step} of {test.run} on {test.layout}")
    if not waited and begun:
        screen.note(f"  verdict:  orch restore-tests history {begun[0].run}")
