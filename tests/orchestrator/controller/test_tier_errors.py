"""A tier that fails when a job is launched is named in the run's status, not the run's own folder."""

import errno
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.scenarios.world import World, config


def test_a_tier_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "NoCredentialsError: Unable to locate credentials")

    data = config()
    data["checkpoint"]["tiers"] = [{"path": "run"}, {"path": "memory://bucket/runs"}]
    with monkeypatch.context() as patched:
        patched.setattr(fsspec.get_filesystem_class("memory"), "ls", fail)
        world = World(tmp_path, data=data)
        for _ in range(5):
            world.tick()
            world.slurm.step(1.0)
        wanted = f"memory:///bucket/runs/{world.name}: NoCredentialsError: Unable to locate credentials"
        assert world.run.reason == f"storage: {wanted}; tried again until it works"
        assert str(tmp_path) not in world.run.reason
    world.turns(60, 1.0, lambda: world.run.step > 0)
    assert world.run.step > 0
