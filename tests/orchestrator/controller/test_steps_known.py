"""Whether the policy may count steps: of a command only its own checkpoints tell, once one was seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.reconciler.conclude import _saved_after, _steps_known
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.ingest import ingest
from orchestrator.states import AttemptState, RunState, Trust
from tests.scenarios.world import World
from trainer.protocol.command_progress import CommandCheckpointsConfig
from trainer.protocol.events import EventKind, EventLog


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
    run = Run(
        name="a-1", state=RunState.RUNNING, reason="", cluster="slurm", run_dir="/r", config_digest="", total_steps=0
    )
    attempt = Attempt(run="a-1", number=1, state=AttemptState.RUNNING, nonce="a", job_name="j", saved_step=saved)
    assert _steps_known(ControlledRun(run=run, attempts=(attempt,), config=config)) is known


def begun(tmp_path: Path) -> tuple[World, EventLog]:
    world = World(tmp_path)
    return world, world.open_events("coordinator")


def read(world: World) -> ControlledRun:
    kept = next(iter(world.controller._configs.values()))
    view = ControlledRun(run=world.run, attempts=tuple(world.attempts), config=kept)
    ingest(world.store, view, epoch=world.lease.epoch, now=world.clock.now)
    return replace(view, attempts=tuple(world.attempts), config=replace(kept, command=("python", "t.py")))


def test_one_that_a_command_writes_anew_has_a_row_and_a_time_of_its_own(tmp_path: Path) -> None:
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


def test_a_save_is_timed_from_the_start_of_its_generation(tmp_path: Path) -> None:
    """Pauses between generations, and what the next attempt finds when it begins, are no time of training."""
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
