"""History of a run as the retry policy gets it: known steps, times of saves, failed batch scripts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.conclude import _saved_after, _steps_known, history
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.ingest import ingest
from orchestrator.states import AttemptState, RunState, Trust
from tests.scenarios.world import World
from trainer.protocol.command_progress import CommandCheckpointsConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import Failure, FailureKind

RUN = Run(name="a-1", state=RunState.RUNNING, reason="", cluster="slurm", run_dir="/r", config_digest="", total_steps=0)


@pytest.mark.parametrize(
    ("config", "saved", "known"),
    [
        (RunConfig(), None, True),
        (RunConfig(command=("python", "t.py")), None, False),
        (RunConfig(command=("python", "t.py"), checkpoints=CommandCheckpointsConfig(path="wrong")), None, False),
        (RunConfig(command=("python", "t.py"), checkpoints=CommandCheckpointsConfig(path="out")), 40, True),
    ],
)
def test_steps_are_known(config: RunConfig, saved: int | None, known: bool) -> None:
    attempt = Attempt(run="a-1", number=1, state=AttemptState.RUNNING, nonce="a", job_name="j", saved_step=saved)
    assert _steps_known(ControlledRun(run=RUN, attempts=(attempt,), config=config)) is known


def begun(tmp_path: Path) -> tuple[World, EventLog]:
    world = World(tmp_path)
    return world, world.open_events("coordinator")


def read(world: World) -> ControlledRun:
    ingest(world.store, world.view, epoch=world.lease.epoch, now=world.clock.now)
    return replace(world.view, config=replace(world.view.config, command=("python", "t.py")))


def test_rewritten_checkpoint_of_a_command_gets_its_own_row_and_time(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    seen = {"step": 0, "path": "/out/c-0", "new": True}
    log.write(EventKind.CHECKPOINT_SEEN, name="c-0.1f", bytes=7, **seen)
    read(world)
    assert world.attempts[0].saved_step == 0
    for number in (2, 3):
        world.clock.now += 60.0
        log.write(EventKind.CHECKPOINT_SEEN, name=f"c-0.1f.{number}.anew", anew="c-0.1f", bytes=number, **seen)
        read(world)
        (row,) = [row for row in world.store.checkpoints(world.name) if row.trust is not Trust.DELETED]
        assert (row.bytes, row.trust, row.committed_at) == (number, Trust.COMMITTED, world.clock.now)
    log.write(EventKind.CHECKPOINT_DELETED, step=0, name="c-0.1f")
    read(world)
    assert {row.trust for row in world.store.checkpoints(world.name)} == {Trust.DELETED}


def test_save_is_timed_from_the_start_of_its_generation(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    began, seen = world.clock.now, {"step": 0, "path": "/out/c-0", "bytes": 7, "new": True}
    for generation, at, saves in ((1, 0.0, (100.0, 700.0)), (2, 5000.0, (5060.0,))):
        log.generation, world.clock.now = generation, began + at
        log.write(EventKind.GENERATION_STARTED, world=1, nodes=["n1"])
        for after in saves:
            world.clock.now = began + after
            log.write(EventKind.CHECKPOINT_SEEN, name=f"c-0.1f.{after:.0f}.anew", anew="c-0.1f", **seen)
    view = read(world)
    assert _saved_after(world.store, view) == {1: 700.0}
    assert _saved_after(world.store, replace(view, config=RunConfig())) == {}, "steps of a workload always grow"
    ended = replace(view.attempts[0], ended_at=began + 600.0)
    assert _saved_after(world.store, replace(view, attempts=(ended,))) == {1: 100.0}


SCRIPT = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", exit_code=127, script=True)
KILLED = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", signal=9, script=True)
UNKNOWN = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", script=True)
BOOT = Failure(kind=FailureKind.LAUNCH_FAILED, reason="")


def ended(number: int, failure: Failure | None, **fields: Any) -> Attempt:
    return Attempt(
        run="a-1", number=number, state=AttemptState.ENDED, nonce="a", job_name="j", started_at=1.0,
        failure=failure.to_json() if failure else None, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "newest", "expected"),
    [
        (ended(1, SCRIPT), SCRIPT, [True, True]),
        (ended(1, BOOT), SCRIPT, [False, True]),
        (ended(1, KILLED), UNKNOWN, [True, True]),
        (ended(1, Failure(kind=FailureKind.RANK_KILLED, reason="", exit_code=1), generations=1), SCRIPT, [False] * 2),
        (ended(1, None), Failure(kind=FailureKind.AGENT_LOST, reason="", exit_code=1), [False, False]),
    ],
)
def test_batch_script_counts_as_failed_only_in_a_run_that_never_trained(
    earlier: Attempt, newest: Failure, expected: list[bool]
) -> None:
    view = ControlledRun(run=RUN, attempts=(earlier, ended(2, None)), config=RunConfig())
    assert [past.script_failed for past in history(view, newest, 2.0)] == expected


@pytest.mark.parametrize(("started_at", "seconds"), [(-6000.0, 30.0), (1010.0, 20.0), (None, 0.0)])
def test_training_time_starts_at_the_submission_if_the_nodes_clock_was_behind(
    started_at: float | None, seconds: float
) -> None:
    last = replace(ended(1, None), submitted_at=1000.0, started_at=started_at)
    view = ControlledRun(run=RUN, attempts=(last,), config=RunConfig())
    assert history(view, BOOT, 1030.0)[0].training_seconds == seconds
