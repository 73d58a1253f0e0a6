"""A run that begins with another one's checkpoint: nobody ever sees its folder without that."""

import time
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from orchestrator.controller.run_dirs.run_folder import ensure_run_dir
from orchestrator.errors import Precondition
from orchestrator.registry.records import Attempt, Run
from orchestrator.states import AttemptState, RunState
from tests.checkpointing.made_checkpoint import make

NAME = "step-00000050.001-0123abcd"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make(LocalStorage(tmp_path), 50, nonce="0123abcd", now=time.time())
    return tmp_path / NAME


def begin(tmp_path: Path, source: Path) -> Path:
    identity: dict[str, Any] = {"imported": {"checkpoint": str(source), "source": "a-1@50", "step": 50}}
    run = Run(
        name="b-1", state=RunState.CREATED, reason="", cluster="local", run_dir=str(tmp_path / "b-1"),
        config_digest="d", total_steps=60, identity=identity,
    )  # fmt: skip
    first = Attempt(run="b-1", number=1, state=AttemptState.INTENT, nonce="0" * 8, job_name="orch-b-1-1-00000000")
    return ensure_run_dir(run, first, {"name": "b"}).path


def test_the_checkpoint_is_there_when_the_folder_is(tmp_path: Path, source: Path) -> None:
    folder = begin(tmp_path, source)
    assert {path.name for path in (folder / "checkpoints" / NAME).iterdir()} == {path.name for path in source.iterdir()}


@pytest.mark.parametrize("lost", ["all", "COMMIT", "shard"])
def test_without_its_checkpoint_a_run_is_not_begun(tmp_path: Path, source: Path, lost: str) -> None:
    """Its run's retention was faster."""
    files = sorted(source.iterdir())
    for path in files:
        if lost in ("all", path.name) or (lost == "shard" and path.suffix == ".distcp"):
            path.unlink()
    if lost == "all":
        source.rmdir()
    with pytest.raises(Precondition, match="the checkpoint that b-1 begins with cannot be used") as caught:
        begin(tmp_path, source)
    assert not isinstance(caught.value.__cause__, OSError), "a controller would try again for ever"
    assert not (tmp_path / "b-1").exists()
    assert not list(tmp_path.glob(".b-1.*"))


def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path: Path, source: Path) -> None:
    (source / "DELETED").write_text("{}")
    with pytest.raises(Precondition, match="cannot be used"):
        begin(tmp_path, source)
