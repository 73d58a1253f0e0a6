"""`orch demo`: a small run that loses a rank and recovers, with a report."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from checkpointing.config import MEMORY
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.drills.restore_test_demo import demo_root, restore_test_demo
from orchestrator.cli.runs.events import end_error, wait_until_end
from orchestrator.cli.runs.run_reader import EventFeed, StepLines
from orchestrator.cli.runs.show import attempt_json, attempt_table
from orchestrator.cli.runs.status import public, status_table
from orchestrator.cli.runs.submit import launch
from orchestrator.cli.terminal.argument_types import NonEmptyPath, timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, decimal
from orchestrator.errors import ConfigError, RunFailed
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.events import Event, EventKind
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The first fault of a run and the recovery from it, with None for events that did not happen."""

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


def read_demo_report(run_dir: Path) -> DemoReport:
    """Build the report from the events and metrics of all attempts."""
    events, steps = EventFeed(run_dir).poll(), StepLines(RunDir(run_dir)).read()
    fault = next((event for event in events if _is_fault(event)), None)
    first = _after(events, fault, EventKind.GENERATION_FIRST_STEP)
    restored = _after(events, fault, EventKind.CHECKPOINT_RESTORED)
    before, after = _around(steps, fault)
    pairs = _replayed_losses(steps)
    return DemoReport(
        fault=_words(fault) if fault else None,
        step=before["step"] if before else None,
        resumed_from=restored.data.get("step") if restored else None,
        tier=str(restored.data.get("tier", "")) if restored else "",
        recovery_s=first.time - fault.time if first and fault else None,
        first_loss=steps[0]["loss"] if steps else None,
        loss_before=before["loss"] if before else None,
        loss_after=after["loss"] if after else None,
        last_loss=steps[-1]["loss"] if steps else None,
        replayed=len(pairs),
        replayed_equal=sum(1 for one, other in pairs if one == other),
    )


def _is_fault(event: Event) -> bool:
    return event.kind == EventKind.DRILL or (event.kind == EventKind.RANK_EXITED and bool(event.data.get("signal")))


def _words(event: Event) -> str:
    data = event.data
    if event.kind == EventKind.DRILL:
        done = {"kill-rank": "killed with SIGKILL", "raise": "made to raise"}.get(data["kind"], data["kind"])
        return f"rank {data['rank']} was {done} after step {data['step']}"
    return f"rank {data['rank']} died of signal {data['signal']}"


def _place(event: Event) -> tuple[int, int]:
    return event.attempt, event.generation


def _after(events: list[Event], fault: Event | None, kind: EventKind) -> Event | None:
    """Return the first event of this kind in a later generation or attempt than the fault's."""
    if fault is None:
        return None
    return next((event for event in events if event.kind == kind and _place(event) > _place(fault)), None)


def _around(steps: list[dict[str, Any]], fault: Event | None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the last step trained before the recovery and the first one after it."""
    if fault is None:
        return None, None
    before = [line for line in steps if (line["attempt"], line["generation"]) <= _place(fault)]
    after = [line for line in steps if (line["attempt"], line["generation"]) > _place(fault)]
    return (before[-1] if before else None), (after[0] if after else None)


def _replayed_losses(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return pairs of losses, first and last, of the steps that were trained again."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for line in steps:
        if line["step"] in first:
            last[line["step"]] = line["loss"]
        first.setdefault(line["step"], line["loss"])
    return [(first[step], loss) for step, loss in last.items()]


RESTORE_TEST = "restore-test"


DEMO_JSON = """
of restore-test: {run, run_dir, seconds, damaged: {step, file, byte, tensor}, tests, passed, wrong}; tests as ckpt
restore-test
"""


@click.command(cls=Verb, json_data=DEMO_JSON)
@click.argument("words", metavar=f"[{RESTORE_TEST}] [KEY=VALUE ...]", nargs=-1)
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for the demo's runs.")
@timeout_option(300.0, least=1.0)
@click.pass_obj
def demo(screen: Screen, words: tuple[str, ...], root: Path | None, timeout: float) -> int:
    """Run a small training here that is killed and recovers.

    Two simulated nodes with two ranks each train on real text. One rank is killed with SIGKILL; orch restarts the
    ranks in place, and the run finishes. It takes about a minute on two cores. The exit code is 8 if the run does
    not recover.

    `orch demo restore-test` trains without the kill and tests the run's checkpoints: one is restored on the same
    ranks and on a single one, the newest is damaged on purpose and found CORRUPT, and the next older one is
    restored. The exit code is 8 if a verdict is wrong.
    """
    if words[:1] == (RESTORE_TEST,):
        return restore_test_demo(screen, words[1:], root, timeout)
    _check_name(words)
    return _killed_and_recovered(screen, words, root, timeout)


def _check_name(words: tuple[str, ...]) -> None:
    """Raise ConfigError for a misspelled name of a demo, which would otherwise be taken for a key."""
    from orchestrator.near_words import nearest  # only for an error

    for word in words:
        if "=" not in word and nearest(word.lower(), [RESTORE_TEST]):
            hint = f"did you mean `orch demo {RESTORE_TEST}`?"
            raise ConfigError(f"no such demo `{word}`", where="command line: orch demo", hint=hint)


def _killed_and_recovered(screen: Screen, overrides: tuple[str, ...], root: Path | None, timeout: float) -> int:
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    started = time.monotonic()
    settings = (f"cluster.root={demo_root(root)}", "cluster.kind=local")
    composed = compose("demo", overrides, environ=os.environ, preset_wins=True, settings=settings)
    screen.note("demo: 2 simulated nodes x 2 ranks train on real text; a rank is killed on the way")
    launched = launch(screen, composed, LOCAL, no_controller=False)
    run = launched["run"]
    screen.note(f"{run}: job {launched['job_id']}, folder {launched['run_dir']}")
    row = wait_until_end(screen, run, timeout=timeout, follow=True)
    report = read_demo_report(Path(launched["run_dir"]))
    seconds = time.monotonic() - started
    _show(screen, row, report, seconds)
    return _judge(screen, row, report)


def _show(screen: Screen, row: dict[str, Any], report: DemoReport, seconds: float) -> None:
    run = row["run"]
    with open_store(readonly=True) as store:
        attempts, generations = store.attempts(run), store.generations(run)
    if screen.json:
        document = {**public([row])[0], "seconds": round(seconds, 2), "story": report.__dict__}
        shown = [attempt_json(attempt, generations) for attempt in attempts]
        screen.data("demo", {**document, "recovered": report.has_recovered, "attempts": shown})
        return
    screen.say("")
    status_table(screen, [row], aligned=True)
    screen.say("\nattempts and their generations")
    attempt_table(screen, attempts, generations)
    screen.say("")
    for line in _lines(report):
        screen.say(line)
    screen.say(f"\n{seconds:.0f} s in all. Look closer:")
    for command in (f"orch show {run}", f"orch logs {run} --rank first-error", f"orch logs {run} --rank all --tail 5"):
        screen.say(f"  {command}")
    screen.say(f"  orch ckpt ls {run}\n  orch ckpt verify {run}")


def _lines(report: DemoReport) -> list[str]:
    lines = []
    if report.fault is not None:
        lines.append(f"hit        {report.fault}")
    if report.recovery_s is not None:
        source = "memory, at" if report.tier == MEMORY else "the checkpoint of"
        resumed = "" if report.resumed_from is None else f", from {source} step {report.resumed_from}"
        lines.append(f"recovered  trained again {report.recovery_s:.1f} s later{resumed}")
    if report.replayed:
        lines.append(
            f"exact      {report.replayed_equal} of {report.replayed} replayed steps had the same loss, bit for bit"
        )
    before, after = decimal(report.loss_before), decimal(report.loss_after)
    first, last = decimal(report.first_loss), decimal(report.last_loss)
    return [*lines, f"loss       first {first}, before the kill {before}, after it {after}, last {last}"]


def _judge(screen: Screen, row: dict[str, Any], report: DemoReport) -> int:
    """Return 0 if the run was hit, recovered and succeeded. Else raises the error, or with --json returns its code."""
    trouble = end_error(row)
    if trouble is None and not report.has_recovered:
        what = "nothing hit the run" if report.fault is None else "the run ended without having recovered"
        trouble = RunFailed(what, where=row["run_dir"], hint=f"orch show {row['run']}")
    if trouble is None:
        return 0
    if screen.json:
        return trouble.exit_code
    raise trouble
