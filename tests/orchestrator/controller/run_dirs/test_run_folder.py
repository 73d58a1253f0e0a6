"""A run that begins with another one's checkpoint: nobody ever sees its folder without that."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from orchestrator.controller.run_dirs.bounded_files import BoundedFiles, DirectFiles, RunDirHangs
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("whose", ["another user's", "open to others"])
def test_a_folder_with_the_right_nonce_is_not_the_runs_own_for_that(tmp_path: Path, source: Path, whose: str) -> None:
    """A job's name tells everybody the nonce."""
    folder = begin(tmp_path, source)
    assert begin(tmp_path, source) == folder
    if whose == "another user's":
        os.chown(folder, 61002, -1)
        said = "the folder of b-1 is not private: .*b-1 belongs to uid 61002"
    else:
        folder.chmod(0o777)
        said = "the folder of b-1 is not private: .*b-1 can be changed by everybody"
    with pytest.raises(Precondition, match=said):
        begin(tmp_path, source)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_that_is_exchanged_is_said_and_what_was_read_is_dropped(tmp_path: Path) -> None:
    run, bobs = tmp_path / "a-1", tmp_path / "bobs"
    run.mkdir()
    bobs.mkdir()
    os.chown(bobs, 61002, -1)

    def exchange() -> str:
        run.rename(tmp_path / "aside")
        bobs.rename(run)
        return "what Bob says"

    with pytest.raises(RunDirHangs, match="belongs to uid 61002"):
        DirectFiles().call(run, exchange)
    with pytest.raises(RunDirHangs, match="belongs to uid 61002"):
        BoundedFiles().call(run, lambda: "it is not even read")
