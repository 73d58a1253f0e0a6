"""Stories of a run whose folder lies on a disk that is really full."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.states import RunState
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.fakes.model_agents import ModelAgents
from tests.scenarios.world import World, config, moves, training
from trainer.protocol.failures.outcome import Failure, FailureKind

MIB = 1 << 20
FAILING = "saves failing since step 10: disk full (/r/checkpoints)"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", "4m") as folder:
        yield folder


def agents_of(world: World) -> ModelAgents:
    agents = world.slurm.running()[0].agents
    assert agents is not None
    return agents


def end_for_want_of_room(world: World, room: int = 3 * MIB) -> None:
    """The attempt ends as one does that could not save; the disk is full by the time anybody looks."""
    agents_of(world).fail(Failure(kind=FailureKind.STORAGE, reason="disk full", room=room))


def test_saves_that_fail_are_the_reason_until_they_work_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents_of(world).saves_failing = FAILING
    world.turns(2, 1.0)
    assert world.run.reason.startswith(f"{FAILING}; job ")
    agents_of(world).saves_failing = ""
    world.turns(2, 1.0)
    assert world.run.reason.startswith("job ")
    assert world.finish().state is RunState.SUCCEEDED


def test_an_attempt_ends_as_storage_and_the_next_one_waits_for_room(disk: Path) -> None:
    world = World(disk)
    training(world, 12)
    end_for_want_of_room(world)
    filler = fill(disk)
    world.turns(60, until=lambda: world.run.state is RunState.RECOVERING)
    assert (world.attempts[0].failure or {})["kind"] == FailureKind.STORAGE
    jobs = len(world.slurm.jobs)
    world.turns(50, 10.0)
    assert world.run.reason == (
        "storage: waits for room in the run's folder: disk full: 0.0 MiB are free, a checkpoint takes 3.0 MiB "
        f"({world.folder.path})"
    )
    # Room for small files is not enough: it would train for nothing.
    filler.write_bytes(bytes(2 * MIB))
    world.turns(5)
    assert (len(world.attempts), len(world.slurm.jobs)) == (1, jobs)
    filler.unlink()
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 2


def test_a_run_that_has_waited_for_a_day_needs_a_person(disk: Path) -> None:
    world = World(disk, data=config(no_progress_hours=2.0))
    training(world, 12)
    end_for_want_of_room(world)
    filler = fill(disk)
    assert world.finish(2000, 60.0).state is RunState.HELD
    assert world.run.reason.startswith("storage: disk full: 0.0 MiB are free")
    assert "for 2 h: recovery.no_progress_hours is spent" in world.run.reason
    assert len(world.attempts) == 1
    # Who resumes it has the same time again to make room.
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(3)
    assert world.run.state is RunState.RECOVERING
    filler.unlink()
    assert world.finish().state is RunState.SUCCEEDED
    assert moves(world).count(RunState.HELD) == 1


def test_a_first_job_waits_for_room(disk: Path) -> None:
    world = World(disk)
    filler = fill(disk)
    world.turns(3)
    assert world.run.state is RunState.CREATED
    assert "No space left on device" in world.run.reason or "disk full" in world.run.reason
    assert world.slurm.jobs == []
    filler.unlink()
    world.turns(2)
    assert world.run.state in (RunState.QUEUED, RunState.RUNNING)


def test_a_run_is_cancelled_although_no_request_can_be_written(disk: Path) -> None:
    world = World(disk)
    training(world, 12)
    agents_of(world)._beat = lambda: None  # type: ignore[method-assign]
    agents_of(world)._train = lambda seconds: None  # type: ignore[method-assign]
    fill(disk)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(20, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED
