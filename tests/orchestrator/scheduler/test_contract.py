"""The contract suite on the local scheduler and on the fake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.scheduler.local import local_scheduler
from orchestrator.scheduler.local.local_scheduler import LocalScheduler
from tests.fakes.scheduler import FakeScheduler
from tests.orchestrator.scheduler.contract import SchedulerContract, World


class TestFake(SchedulerContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return World(scheduler=FakeScheduler(), folder=tmp_path, really=False)


class TestLocal(SchedulerContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[World]:
        index = tmp_path / "index"
        yield World(scheduler=LocalScheduler(entry="tests.slurm.payload:record", index=index), folder=tmp_path)
        for intent in local_scheduler.intents(index):
            local_scheduler.end_marked(intent.name, 0.0)
