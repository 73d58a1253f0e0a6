"""A tier that the controller cannot read: named, done without where nothing is lost by it, else waited for."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from orchestrator.controller import reconcile
from orchestrator.states import RunState
from tests.scenarios.world import World, config, training

TIER = "memory://bucket/runs/sim-1"
WAITS = (
    "storage: the newest checkpoint may be in a tier that cannot be read from here; "
    f"{TIER}: NoCredentialsError: Unable to locate credentials; give this user access to it, or mount it"
)

Failing = Callable[[], Any]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Within the block, the store refuses to list."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EACCES, "NoCredentialsError: Unable to locate credentials")

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(fsspec.get_filesystem_class("memory"), "ls", fail)
            yield

    return block


def tiered(root: Path, **recovery: Any) -> World:
    data = config(**recovery)
    data["checkpoint"]["tiers"] = [{"path": "memory://bucket/runs"}, {"path": "run"}]
    return World(root, data=data)


def lose_job(world: World) -> None:
    """Slurm ends the job of a run that has saved steps 5 and 10."""
    training(world, 12)
    job = world.slurm.running()[0]
    assert job.agents is not None
    job.agents.lose_coordinator()
    world.slurm.end(job, "NODE_FAIL")


def intents(world: World) -> list[str]:
    return [move.reason for move in world.store.transitions(world.name) if move.after == "INTENT"]


def test_a_first_attempt_reads_no_tier(tmp_path: Path, failing: Failing) -> None:
    world = tiered(tmp_path)
    with failing():
        training(world, 1)


def test_the_run_goes_on_without_a_tier_where_its_newest_checkpoint_is_in_another(
    tmp_path: Path, failing: Failing
) -> None:
    world = tiered(tmp_path)
    lose_job(world)
    with failing():
        assert world.finish().state is RunState.SUCCEEDED
    assert intents(world)[-1] == (
        f"next attempt; without the tier {TIER}, which cannot be read: NoCredentialsError: Unable to locate credentials"
    )
    agents = world.slurm.agents_of[world.name][-1]
    assert agents.trained[0][1] == 11


def test_a_run_whose_newest_checkpoint_may_be_in_the_tier_waits_and_is_held_in_the_end(
    tmp_path: Path, failing: Failing
) -> None:
    world = tiered(tmp_path, no_progress_hours=2.0)
    lose_job(world)
    with failing():
        away = world.folder.checkpoints.rename(tmp_path / "away")
        world.folder.checkpoints.mkdir()
        world.turns(20, 30.0)
        assert (world.run.state, world.run.reason) == (RunState.RECOVERING, f"{WAITS}; retrying until it works")
        assert world.finish(2000, 60.0).state is RunState.HELD
        spent = f"{WAITS}, for 2 h: recovery.no_progress_hours is spent; when it is fixed: orch resume {world.name}"
        assert world.run.reason == spent
        world.store.add_user_request(world.name, "resume", {}, world.clock.now)
        assert world.finish(2000, 60.0).state is RunState.HELD
    assert len(world.attempts) == 1
    shutil.rmtree(world.folder.checkpoints)
    away.rename(world.folder.checkpoints)
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED


def test_a_job_that_waits_for_its_release_waits_no_longer_than_that(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tiered(tmp_path, no_progress_hours=2.0)
    lose_job(world)
    look = reconcile.wait_for_tiers
    with failing(), monkeypatch.context() as patched:
        world.folder.checkpoints.rename(tmp_path / "away")
        world.folder.checkpoints.mkdir()
        patched.setattr(reconcile, "wait_for_tiers", lambda *_: (False, ""))
        world.turns(100, 30.0, lambda: len(world.attempts) == 2)
        patched.setattr(reconcile, "wait_for_tiers", look)
        world.turns(10, 30.0)
        assert (len(world.attempts), world.run.reason) == (2, f"{WAITS}; retrying until it works")
        assert world.finish(2000, 60.0).state is RunState.HELD
    assert world.run.reason.startswith(WAITS)
    assert not any(job.live for job in world.slurm.jobs)
