"""`orch demo`: a small run that loses a rank and recovers, or whose checkpoints are tested after one is damaged."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from checkpointing.config import MEMORY
from checkpointing.format.manifest import INDEX, parse_index
from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.restore_tests import restore_test_json, show_tests
from orchestrator.cli.runs.events import following, wait_until_end
from orchestrator.cli.runs.run_reader import EventFeed, StepLines
from orchestrator.cli.runs.show import attempt_json, attempt_table
from orchestrator.cli.runs.status import status_table
from orchestrator.cli.runs.submit import launch
from orchestrator.cli.terminal.argument_types import NonEmptyPath, timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, decimal
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, OrchError, Precondition, RunFailed
from orchestrator.home import make_state_home
from orchestrator.registry.records import Checkpoint, RestoreTest
from orchestrator.run_view import RunView
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.events import Event, EventKind
from trainer.protocol.restore_test import Outcome
from trainer.protocol.run_dir import RunDir

RESTORE_TEST = "restore-test"
WITHOUT_KILL = (
    "name=restore-test-demo", "train.steps=30", "checkpoint.every=10", "drill.events=[]", "restore_tests.every=off",
)  # fmt: skip
"""The run of `orch demo` without the kill, with three checkpoints and no scheduled tests."""
OTHER_LAYOUT = "1"


DEMO_JSON = """
of restore-test: {run, run_dir, seconds, damaged: {step, file, byte, tensor}, tests, passed, wrong}; tests as in ckpt
restore-test
"""


@click.command(cls=Verb, json_data=DEMO_JSON)
@click.argument("words", metavar=f"[{RESTORE_TEST}] [KEY=VALUE ...]", nargs=-1)
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for the demo's runs.")
@timeout_option(300.0, least=1.0)
@click.pass_obj
def demo(screen: Screen, words: tuple[str, ...], root: Path | None, timeout: float) -> int:
    """Run a small training job here that is killed and recovers.

    Two simulated nodes with two ranks each train on real text. One rank is killed with SIGKILL; orch restarts the
    ranks in place, and the run finishes. It takes half a minute on two cores. The exit code is 8 if the run does
    not recover.

    `orch demo restore-test` trains without the kill and tests the run's checkpoints: one is restored on the same ranks
    and on a single rank, the newest is damaged on purpose and found CORRUPT, and the next older one is restored. The
    exit code is 8 if a verdict is wrong.
    """
    from orchestrator.near_words import nearest  # only for an error

    if words[:1] == (RESTORE_TEST,):
        return _demonstrate_restore_tests(screen, words[1:], root, timeout)
    for word in words:
        if "=" not in word and nearest(word.lower(), [RESTORE_TEST]):  # otherwise it would be taken for a key
            hint = f"did you mean `orch demo {RESTORE_TEST}`?"
            raise ConfigError(f"no such demo `{word}`", where="command line: orch demo", hint=hint)
    return _demonstrate_recovery(screen, words, root, timeout)


def demo_root(given: Path | None) -> Path:
    """Return the demo folder, creating it if needed. Raises ConfigError for a file, Precondition if it cannot."""
    folder = (given or make_state_home() / "demo-runs").expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next((place for place in (folder, *folder.parents) if place.is_file()), folder)
        raise ConfigError(f"{taken} is a file, and must be a folder", where="--root", hint="--root FOLDER") from error
    except OSError as error:
        what = f"the folder for the demo's runs cannot be created: {error.strerror}"
        raise Precondition(what, where=str(folder), hint="--root FOLDER") from error
    return folder


def launch_demo(
    screen: Screen, overrides: tuple[str, ...], settings: tuple[str, ...], note: str,
    check: Callable[[RunConfig], None] = lambda config: None,
) -> tuple[str, Path]:  # fmt: skip
    """Submit a small run on this machine; return its name and folder. `check` raises an error for a bad config."""
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    settings = ("cluster.kind=local", *settings)
    composed = compose("demo", overrides, environ=os.environ, preset_wins=True, settings=settings)
    check(composed.config)
    screen.note(note)
    launched = launch(screen, composed, LOCAL, no_controller=False)
    screen.note(f"{launched['run']}: job {launched['job_id']}, folder {launched['run_dir']}")
    return launched["run"], Path(launched["run_dir"])


def _finish(screen: Screen, trouble: OrchError | None) -> int:
    """Return 0 if there is no error; otherwise raise it or, with --json, return its exit code."""
    if trouble is not None and not screen.json:
        raise trouble
    return 0 if trouble is None else trouble.exit_code


def _demonstrate_recovery(screen: Screen, overrides: tuple[str, ...], root: Path | None, timeout: float) -> int:
    started = time.monotonic()
    note = "demo: 2 simulated nodes x 2 ranks train on real text; a rank is killed along the way"
    run, run_dir = launch_demo(screen, overrides, (f"cluster.root={demo_root(root)}",), note)
    view = wait_until_end(screen, run, timeout=timeout, follow=True)
    report = read_demo_report(run_dir)
    _show_recovery(screen, view, report, time.monotonic() - started)
    trouble = view.end_error
    if trouble is None and not report.has_recovered:
        what = "no fault hit the run" if report.fault is None else "the run ended without having recovered"
        trouble = RunFailed(what, where=str(run_dir), hint=f"orch show {run}")
    return _finish(screen, trouble)


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """First fault of a run, and the recovery from it. None stands for an event that did not happen."""

    fault: str | None
    step: int | None
    resumed_from: int | None
    tier: str  # source of the restored state: `memory` or the path of a tier; empty without a restore
    recovery_s: float | None
    first_loss: float | None
    loss_before: float | None
    loss_after: float | None
    last_loss: float | None
    replayed: int
    replayed_equal: int

    @property
    def has_recovered(self) -> bool:
        return self.fault is not None and self.recovery_s is not None

    def lines(self) -> list[str]:
        """Describe the fault and the recovery."""
        lines = []
        if self.fault is not None:
            lines.append(f"hit        {self.fault}")
        if self.recovery_s is not None:
            source = "memory, at" if self.tier == MEMORY else "the checkpoint of"
            resumed = "" if self.resumed_from is None else f", from {source} step {self.resumed_from}"
            lines.append(f"recovered  trained again {self.recovery_s:.1f} s later{resumed}")
        if self.replayed:
            equal = f"{self.replayed_equal} of {self.replayed} replayed steps had the same loss, bit for bit"
            lines.append(f"exact      {equal}")
        first, before = decimal(self.first_loss), decimal(self.loss_before)
        after, last = decimal(self.loss_after), decimal(self.last_loss)
        return [*lines, f"loss       first {first}, before the kill {before}, after it {after}, last {last}"]


def read_demo_report(run_dir: Path) -> DemoReport:
    """Build the report from the events and metrics of all attempts."""
    events, steps = EventFeed(run_dir).poll(), StepLines(RunDir(run_dir)).read()
    faults = (
        event for event in events
        if event.kind == EventKind.DRILL or (event.kind == EventKind.RANK_EXITED and event.data.get("signal"))
    )  # fmt: skip
    fault = next(faults, None)
    hit = (fault.attempt, fault.generation) if fault else (0, 0)
    # Events and steps of generations or attempts after the fault's.
    later = [event for event in events if fault and (event.attempt, event.generation) > hit]
    first = next((event for event in later if event.kind == EventKind.GENERATION_FIRST_STEP), None)
    restored = next((event for event in later if event.kind == EventKind.CHECKPOINT_RESTORED), None)
    before = [line for line in steps if fault and (line["attempt"], line["generation"]) <= hit]
    after = [line for line in steps if fault and (line["attempt"], line["generation"]) > hit]
    losses: dict[int, list[float]] = {}
    for line in steps:
        losses.setdefault(line["step"], []).append(line["loss"])
    replayed = [(found[0], found[-1]) for found in losses.values() if len(found) > 1]
    return DemoReport(
        fault=_fault_words(fault) if fault else None,
        step=before[-1]["step"] if before else None,
        resumed_from=restored.data.get("step") if restored else None,
        tier=str(restored.data.get("tier", "")) if restored else "",
        recovery_s=first.time - fault.time if first and fault else None,
        first_loss=steps[0]["loss"] if steps else None,
        loss_before=before[-1]["loss"] if before else None,
        loss_after=after[0]["loss"] if after else None,
        last_loss=steps[-1]["loss"] if steps else None,
        replayed=len(replayed),
        replayed_equal=sum(first_loss == last_loss for first_loss, last_loss in replayed),
    )


def _fault_words(event: Event) -> str:
    data = event.data
    if event.kind == EventKind.DRILL:
        done = {"kill-rank": "killed with SIGKILL", "raise": "made to raise"}.get(data["kind"], data["kind"])
        return f"rank {data['rank']} was {done} after step {data['step']}"
    return f"rank {data['rank']} died of signal {data['signal']}"


def _show_recovery(screen: Screen, view: RunView, report: DemoReport, seconds: float) -> None:
    run = view.run
    with open_store(readonly=True) as store:
        attempts, generations = store.attempts(run), store.generations(run)
    if screen.json:
        document = {**view.to_json(), "seconds": round(seconds, 2), "story": report.__dict__}
        shown = [attempt_json(attempt, generations) for attempt in attempts]
        screen.data("demo", {**document, "recovered": report.has_recovered, "attempts": shown})
        return
    screen.say("")
    status_table(screen, [view], aligned=True)
    screen.say("\nattempts and their generations")
    attempt_table(screen, attempts, generations)
    screen.say("\n" + "\n".join(report.lines()))
    commands = (
        f"orch show {run}", f"orch logs {run} --rank first-error", f"orch logs {run} --rank all --tail 5",
        f"orch ckpt ls {run}", f"orch ckpt verify {run}",
    )  # fmt: skip
    _show_commands(screen, commands, seconds)


def _show_commands(screen: Screen, commands: Sequence[str], seconds: float) -> None:
    screen.say(f"\n{seconds:.0f} s in all. Look closer:")
    for command in commands:
        screen.say(f"  {command}")


@dataclass(frozen=True, kw_only=True)
class FlippedBit:
    """Location of the damage in a checkpoint; `byte` is the offset in the file."""

    step: int
    file: str
    byte: int
    tensor: str


def _demonstrate_restore_tests(screen: Screen, overrides: tuple[str, ...], root: Path | None, timeout: float) -> int:
    """Train, test, damage, test again, and print the results; return 0 if every verdict is correct."""
    started = time.monotonic()
    note = "demo: 2 simulated nodes x 2 ranks train on real text; then their checkpoints are tested"
    run, run_dir = launch_demo(screen, overrides, (f"cluster.root={demo_root(root)}", *WITHOUT_KILL), note)
    trouble = wait_until_end(screen, run, timeout=timeout, follow=True).end_error
    if trouble is not None:
        raise trouble
    with open_store(readonly=True) as store:
        saved = [row for row in store.checkpoints(run) if Path(row.path).is_dir()]
    if len(saved) < 3:
        hint = "leave train.steps, checkpoint.every, checkpoint.keep and checkpoint.tiers as they are"
        what = f"{run} has {len(saved)} checkpoints, the demo needs three"
        raise Precondition(what, where=str(run_dir), hint=hint)
    newest, older, oldest = saved[:3]
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
    _show_tests(screen, run, run_dir, tests, bit, wrong, time.monotonic() - started)
    hint = f"orch restore-tests history {run}"
    return _finish(screen, RunFailed("; ".join(wrong), where=str(run_dir), hint=hint) if wrong else None)


def _run_restore_test(screen: Screen, checkpoint: Checkpoint, layout: str, seconds: float) -> RestoreTest:
    from orchestrator.restore_tests.controller_pass import begin_test
    from orchestrator.restore_tests.create import RestoreTestRequest
    from orchestrator.run_dirs.bounded_files import DirectFiles

    with open_store() as store:
        request = RestoreTestRequest(checkpoint=checkpoint, layout=layout, forced=True)
        test = begin_test(store, DirectFiles(), store.run(checkpoint.run), request, time.time())
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
    damage(checkpoint / piece.file, at)
    return FlippedBit(step=step, file=piece.file, byte=at, tensor=piece.key)


def damage(path: Path, at: int) -> None:
    """Flip one bit of a file. A hard link that another run's checkpoint shares is replaced by a copy first."""
    if path.stat().st_nlink > 1:
        own = path.with_name(f"{path.name}.own")
        shutil.copyfile(path, own)
        os.replace(own, path)
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
        stream.flush()
        os.fsync(stream.fileno())


def verdict_line(test: RestoreTest) -> str:
    """Format one test as a line: verdict, time to the first step on this layout, and reason."""
    rto = test.evidence.get("rto_seconds")
    took = f", first step after {rto:.1f} s" if isinstance(rto, float) else ""
    return f"{test.verdict:<9}  step {test.step} on {_ranks(test.layout)}{took}: {test.reason}"


def _ranks(layout: str) -> str:
    return "the same ranks" if layout == "same" else f"{layout} rank{'' if layout == '1' else 's'}"


def describe_wrong_verdicts(tests: Sequence[RestoreTest], bit: FlippedBit) -> list[str]:
    found = []
    for test in tests:
        damaged = test.step == bit.step
        right = Outcome.CORRUPT if damaged else Outcome.RESTORED
        if test.verdict != right:
            found.append(f"step {test.step} on {test.layout} is {test.verdict}, not {right}: {test.reason}")
        elif damaged and bit.file not in test.reason:
            found.append(f"the damage is in {bit.file}, but the verdict is: {test.reason}")
        elif not damaged and not test.evidence.get("compared"):
            found.append(f"step {test.step} on {test.layout}: no step was compared")
    return found


def _show_tests(
    screen: Screen, run: str, run_dir: Path, tests: Sequence[RestoreTest], bit: FlippedBit, wrong: list[str],
    seconds: float,
) -> None:  # fmt: skip
    if screen.json:
        document: dict[str, Any] = {
            "run": run, "run_dir": str(run_dir), "seconds": round(seconds, 2), "damaged": asdict(bit),
            "tests": [restore_test_json(test) for test in tests], "passed": not wrong, "wrong": wrong,
        }  # fmt: skip
        screen.data("demo.restore-test", document)
        return
    good = max((test.step for test in tests if test.verdict == Outcome.RESTORED), default=None)
    if good is not None:
        screen.say(f"good       up to step {good}: `orch resume` continues from there")
    screen.say(f"\n$ orch restore-tests history {run}")
    show_tests(screen, tests[::-1])
    commands = (
        f"orch ckpt ls {run}", f"orch show {tests[-1].test}", f"orch ckpt verify {run}@{bit.step}",
        f"orch ckpt restore-test {run}@{tests[-1].step} --layout 1x2 --wait", f"orch resume {run} train.steps=40",
    )  # fmt: skip
    _show_commands(screen, commands, seconds)
