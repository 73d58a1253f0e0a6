"""`orch demo restore-test`: restore tests of a small run's checkpoints, one of them damaged."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.format.manifest import INDEX, parse_index
from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.restore_tests import restore_test_json, show_tests
from orchestrator.cli.runs.events import end_error, following, wait_until_end
from orchestrator.cli.runs.submit import launch
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, RunFailed
from orchestrator.home import make_state_home
from orchestrator.registry.records import Checkpoint, RestoreTest
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.restore_test import Outcome


def demo_root(given: Path | None) -> Path:
    """Return the folder of demos, creating it if needed. Raises ConfigError for a file, Precondition if that fails."""
    folder = (given or make_state_home() / "demo-runs").expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next((place for place in (folder, *folder.parents) if place.is_file()), folder)
        raise ConfigError(f"{taken} is a file, and must be a folder", where="--root", hint="--root FOLDER") from error
    except OSError as error:
        what = f"the folder for the demo's runs cannot be made: {error.strerror}"
        raise Precondition(what, where=str(folder), hint="--root FOLDER") from error
    return folder


SETTINGS = (
    "name=restore-test-demo", "train.steps=30", "checkpoint.every=10", "drill.events=[]", "restore_tests.every=off",
)  # fmt: skip
"""The run of `orch demo` without the kill, with three checkpoints and no scheduled tests."""
OTHER_LAYOUT = "1"


@dataclass(frozen=True, kw_only=True)
class FlippedBit:
    """Location of the damage in a checkpoint; `byte` is the offset from the start of the file."""

    step: int
    file: str
    byte: int
    tensor: str


def restore_test_demo(screen: Screen, overrides: tuple[str, ...], root: Path | None, timeout: float) -> int:
    """Train, test, damage, test again, and print the results. Returns 0 if every verdict is correct."""
    started = time.monotonic()
    run, run_dir = _train_demo_run(screen, overrides, root, timeout)
    newest, older, oldest = _newest_three(run, run_dir)
    tests = []

    def test(checkpoint: Checkpoint, layout: str) -> None:
        screen.note(f"restore test of step {checkpoint.step} on {_ranks(layout)}")
        tests.append(_run_restore_test(screen, checkpoint, layout, timeout - (time.monotonic() - started)))
        screen.say(verdict_line(tests[-1]))

    screen.say("")
    test(oldest, "same")
    test(oldest, OTHER_LAYOUT)
    bit = flip_bit(Path(newest.path), newest.step)
    screen.say(f"damaged    on purpose: one bit of step {bit.step} was flipped, at byte {bit.byte} of {bit.file}")
    test(newest, OTHER_LAYOUT)
    test(older, OTHER_LAYOUT)
    wrong = describe_wrong_verdicts(tests, bit)
    _show(screen, run, run_dir, tests, bit, wrong, time.monotonic() - started)
    return _judge(screen, run, run_dir, wrong)


def _train_demo_run(screen: Screen, overrides: tuple[str, ...], root: Path | None, timeout: float) -> tuple[str, str]:
    """Train the run and return its name and folder. Raises the error that ended it."""
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    settings = (f"cluster.root={demo_root(root)}", "cluster.kind=local", *SETTINGS)
    composed = compose("demo", overrides, environ=os.environ, preset_wins=True, settings=settings)
    screen.note("demo: 2 simulated nodes x 2 ranks train on real text; then their checkpoints are tested")
    launched = launch(screen, composed, LOCAL, no_controller=False)
    run, run_dir = str(launched["run"]), str(launched["run_dir"])
    screen.note(f"{run}: job {launched['job_id']}, folder {run_dir}")
    trouble = end_error(wait_until_end(screen, run, timeout=timeout, follow=True))
    if trouble is not None:
        raise trouble
    return run, run_dir


def _newest_three(run: str, run_dir: str) -> list[Checkpoint]:
    with open_store(readonly=True) as store:
        found = [row for row in store.checkpoints(run) if Path(row.path).is_dir()]
    if len(found) < 3:
        raise Precondition(
            f"{run} has {len(found)} checkpoints, the demo needs three", where=run_dir,
            hint="leave train.steps, checkpoint.every, checkpoint.keep and checkpoint.tiers as they are",
        )  # fmt: skip
    return found[:3]


def _run_restore_test(screen: Screen, checkpoint: Checkpoint, layout: str, seconds: float) -> RestoreTest:
    """Run one restore test from submission to verdict. Raises WaitTimeout."""
    from orchestrator.restore_tests.controller_pass import begin_test
    from orchestrator.restore_tests.create import RestoreTestRequest
    from orchestrator.run_dirs.bounded_files import DirectFiles

    with open_store() as store:
        asked = RestoreTestRequest(checkpoint=checkpoint, layout=layout, forced=True)
        test = begin_test(store, DirectFiles(), store.run(checkpoint.run), asked, time.time())
        wake_controller(screen, LOCAL, no_controller=False)

        def now() -> RestoreTest:
            return store.restore_test(test.test) or test

        with following(screen, test.test, follow=False) as follower:
            follower.until(lambda _: now().ended_at is not None, max(0.0, seconds))
        return now()


def flip_bit(checkpoint: Path, step: int) -> FlippedBit:
    """Flip one bit in the middle of the largest saved piece of the model."""
    index = parse_index((checkpoint / INDEX).read_bytes())
    piece = max((piece for piece in index.pieces if piece.key.startswith("model/")), key=lambda piece: piece.nbytes)
    at = piece.data + piece.nbytes // 2
    with (checkpoint / piece.file).open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
        stream.flush()
        os.fsync(stream.fileno())
    return FlippedBit(step=step, file=piece.file, byte=at, tensor=piece.key)


def verdict_line(test: RestoreTest) -> str:
    """Format one test as a line: verdict, time to the first step on this layout, and reason."""
    rto = test.evidence.get("rto_seconds")
    took = f", first step after {rto:.1f} s" if isinstance(rto, float) else ""
    return f"{test.verdict:<9}  step {test.step} on {_ranks(test.layout)}{took}: {test.reason}"


def _ranks(layout: str) -> str:
    return "the same ranks" if layout == "same" else f"{layout} rank{'' if layout == '1' else 's'}"


def describe_wrong_verdicts(tests: Sequence[RestoreTest], bit: FlippedBit) -> list[str]:
    """Describe every wrong verdict. Pure."""
    found = []
    for test in tests:
        damaged = test.step == bit.step
        right = Outcome.CORRUPT if damaged else Outcome.RESTORED
        if test.verdict != right:
            found.append(f"step {test.step} on {test.layout} is {test.verdict} and not {right}: {test.reason}")
        elif damaged and bit.file not in test.reason:
            found.append(f"the damage is in {bit.file}, the test says: {test.reason}")
        elif not damaged and not test.evidence.get("compared"):
            found.append(f"step {test.step} on {test.layout}: no step was compared")
    return found


def _show(
    screen: Screen, run: str, run_dir: str, tests: Sequence[RestoreTest], bit: FlippedBit, wrong: list[str],
    seconds: float,
) -> None:  # fmt: skip
    if screen.json:
        document: dict[str, Any] = {
            "run": run, "run_dir": run_dir, "seconds": round(seconds, 2), "damaged": asdict(bit),
            "tests": [restore_test_json(test) for test in tests], "passed": not wrong, "wrong": wrong,
        }  # fmt: skip
        screen.data("demo.restore-test", document)
        return
    good = max((test.step for test in tests if test.verdict == Outcome.RESTORED), default=None)
    if good is not None:
        screen.say(f"good       up to step {good}: `orch resume` goes on from there")
    screen.say(f"\n$ orch restore-tests history {run}")
    show_tests(screen, tests[::-1])
    screen.say(f"\n{seconds:.0f} s in all. Look closer:")
    for command in (
        f"orch ckpt ls {run}",
        f"orch show {tests[-1].test}",
        f"orch ckpt verify {run}@{bit.step}",
        f"orch ckpt restore-test {run}@{tests[-1].step} --layout 1x2 --wait",
        f"orch resume {run} train.steps=40",
    ):
        screen.say(f"  {command}")


def _judge(screen: Screen, run: str, run_dir: str, wrong: list[str]) -> int:
    if not wrong:
        return 0
    trouble = RunFailed("; ".join(wrong), where=run_dir, hint=f"orch restore-tests history {run}")
    if screen.json:
        return trouble.exit_code
    raise trouble
