"""Local jobs whose folder lies on a disk that is really full."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import Precondition
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.local import local_scheduler
from orchestrator.scheduler.local.local_scheduler import LocalScheduler
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.orchestrator.scheduler.contract import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    index = tmp_path / "index"
    with small_tmpfs(tmp_path / "disk", "1m") as folder:
        yield World(scheduler=LocalScheduler(entry="tests.slurm.payload:record", index=index), folder=folder)
        for intent in local_scheduler.intents(index):
            local_scheduler.end_marked(intent.name, 0.0)


def test_a_job_is_refused_with_the_disk_as_the_reason_and_starts_once_there_is_room_and_its_end_finds_room(
    world: World,
) -> None:
    world.resources = Resources(nodes=1, time="5")
    spec = world.spec()
    filler = fill(world.folder)
    with pytest.raises(Precondition) as refused:
        world.scheduler.submit(spec)
    assert refused.value.what == f"storage: the local job cannot be started: disk full ({spec.submission})"
    assert isinstance(refused.value.__cause__, OSError), "by its cause it is known to pass"
    assert world.scheduler.find(spec.name) == []
    filler.unlink()
    job = world.submit(spec)
    world.release(job, spec)
    world.until_running(job, spec)
    fill(world.folder)
    world.scheduler.cancel(job.job_id)
    assert world.until_ended(job) == "CANCELLED"
    assert local_scheduler.read_end(spec.submission) is not None
