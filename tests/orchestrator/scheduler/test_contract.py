"""The contract suite on the local scheduler and on the fake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.scheduler import FakeScheduler
from tests.orchestrator.scheduler.contract import SchedulerContract, World, local_world


class TestFake(SchedulerContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return World(scheduler=FakeScheduler(), folder=tmp_path, really=False)


class TestLocal(SchedulerContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[World]:
        with local_world(tmp_path, tmp_path / "index") as made:
            yield made
