"""A run that begins with another one's checkpoint: nobody ever sees its folder without that."""

import json
import os
import re
import shutil
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import temporary_folder
from checkpointing.verification.verify import Report
from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import Precondition
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs import run_folder
from orchestrator.run_dirs.bounded_files import BoundedFiles, DirectFiles, RunDirHangs
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.run_dirs.run_folder import check_run_folder, ensure_run_dir
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.script import prepare
from orchestrator.states import AttemptState, RunState
from orchestrator.submission.run_identity import identify
from tests.checkpointing.made_checkpoint import make
from trainer.protocol import skipped_batches
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip

NAME = "step-00000050.001-0123abcd"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make(LocalStorage(tmp_path), 50, nonce="0123abcd", now=time.time())
    return tmp_path / NAME


def begin(tmp_path: Path, source: Path, **more: Any) -> Path:
    identity: dict[str, Any] = {"imported": {"checkpoint": str(source), "source": "a-1@50", "step": 50, **more}}
    run = Run(
        name="b-1", state=RunState.CREATED, reason="", cluster="local", run_dir=str(tmp_path / "b-1"),
        config_digest="d", total_steps=60, identity=identity,
    )  # fmt: skip
    first = Attempt(run="b-1", number=1, state=AttemptState.INTENT, nonce="0" * 8, job_name="orch-b-1-1-00000000")
    return ensure_run_dir(run, first, {"name": "b"}).path


def test_the_checkpoint_is_there_when_the_folder_is(tmp_path: Path, source: Path) -> None:
    folder = begin(tmp_path, source)
    assert {path.name for path in (folder / "checkpoints" / NAME).iterdir()} == {path.name for path in source.iterdir()}


def test_the_batches_that_its_source_has_skipped_are_skipped_from_the_start(tmp_path: Path, source: Path) -> None:
    bad = Skip(step=60, position=59, reason="loss nan")
    assert skipped_batches.read_all(RunDir(begin(tmp_path, source, skipped=[asdict(bad)]))) == (bad,)


@pytest.mark.parametrize("lost", ["all", "COMMIT", "shard"])
def test_without_its_checkpoint_a_run_is_not_begun(tmp_path: Path, source: Path, lost: str) -> None:
    files = sorted(source.iterdir())
    for path in files:
        if lost in ("all", path.name) or (lost == "shard" and path.suffix == ".distcp"):
            path.unlink()
    if lost == "all":
        source.rmdir()
    with pytest.raises(Precondition, match="the checkpoint that b-1 starts from cannot be used") as caught:
        begin(tmp_path, source)
    assert not isinstance(caught.value.__cause__, OSError), "a controller would try again for ever"
    assert not (tmp_path / "b-1").exists()
    assert not list(tmp_path.glob(".b-1.*"))


@pytest.mark.parametrize("then", ["the checkpoint stays", "the checkpoint is deleted"])
def test_the_slower_maker_takes_the_folder_of_the_faster_one(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    real, makers = run_folder.verify_checkpoint, []

    def while_another_finishes(storage: LocalStorage, name: str, level: int) -> Report:
        makers.append(name)
        if len(makers) == 1:
            begin(tmp_path, source)
            if then == "the checkpoint is deleted":
                shutil.rmtree(source)
                shutil.rmtree(storage.root / name, ignore_errors=True)
        return real(storage, name, level)

    monkeypatch.setattr(run_folder, "verify_checkpoint", while_another_finishes)
    folder = begin(tmp_path, source)
    assert len(makers) == 2
    assert real(LocalStorage(folder / "checkpoints"), NAME, 0).ok
    assert not list(tmp_path.glob(".b-1.*"))


def test_only_drafts_of_dead_or_old_makers_are_swept(tmp_path: Path, source: Path) -> None:
    here = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    dead = tmp_path / f".b-1.00000000.{here}.01234567.tmp"
    far, other = (tmp_path / f".{run}.00000000.far.01234567.tmp" for run in ("b-1", "c-1"))
    older = tmp_path / ".d-1.00000000.01234567.tmp"
    notes = tmp_path / ".notes.tmp"
    for path in (dead, far, other, older, notes):
        path.mkdir()
    long_ago = time.time() - 2 * 86400
    for path in (other, older, notes):
        os.utime(path, (long_ago, long_ago))
    with temporary_folder(tmp_path, "b-1.00000000") as alive:
        begin(tmp_path, source)
        assert {path for path in tmp_path.iterdir() if path.suffix == ".tmp"} == {alive, far, notes}


def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path: Path, source: Path) -> None:
    (source / "DELETED").write_text("{}")
    with pytest.raises(Precondition, match="cannot be used"):
        begin(tmp_path, source)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("whose", ["another user's", "open to others"])
def test_a_folder_with_the_right_nonce_is_not_the_runs_own_for_that(tmp_path: Path, source: Path, whose: str) -> None:
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


def test_a_deleted_run_json_is_written_again_where_the_folder_is_the_runs_own(tmp_path: Path) -> None:
    run = Run(
        name="b-1", state=RunState.RUNNING, reason="", cluster="local", run_dir=str(tmp_path / "b-1"),
        config_digest="d", total_steps=60,
    )  # fmt: skip
    first = Attempt(run="b-1", number=1, state=AttemptState.RUNNING, nonce="0" * 8, job_name="orch-b-1-1-00000000")
    folder = ensure_run_dir(run, first, {"name": "b"})
    written = folder.run.read_bytes()
    folder.run.unlink()
    assert check_run_folder(run, first) == ""
    assert folder.run.read_bytes() == written

    folder.run.unlink()
    other = replace(first, nonce="1" * 8)
    assert "run.json is missing and cannot be rewritten" in check_run_folder(run, other)
    (folder.attempt(1).path / "intent.json").unlink()
    assert "intent.json: No such file" in check_run_folder(run, first)
    assert not folder.run.exists()
    shutil.rmtree(folder.path)
    folder.path.mkdir()  # where its file system is not mounted
    assert check_run_folder(run, first).startswith("the run directory is not visible on ")


def spec(identity: dict[str, object], config: RunConfig | None = None) -> JobSpec:
    run = Run(
        name="tiny-1", state=RunState.CREATED, reason="", cluster="local", run_dir="/shared/tiny-1",
        config_digest="0" * 64, total_steps=1, identity=identity,
    )  # fmt: skip
    attempt = Attempt(
        run=run.name, number=2, state=AttemptState.INTENT, nonce="0" * 8, job_name="orch-tiny-1-2-00000000"
    )
    return job_spec(run, attempt, config or RunConfig())


def test_spare_nodes_are_asked_for_beside_those_that_train() -> None:
    asked = spec({}, RunConfig(cluster=ClusterConfig(nodes=4, spare_nodes=2))).resources
    assert (asked.nodes, asked.spares) == (6, 2)


def test_a_later_attempt_starts_with_the_interpreter_and_variables_of_the_submitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"PATH": "/opt/bin:/bin", "SLURM_JWT": "hunter2", "ORCH_API_KEY": "hunter2", "EDITOR": "vi"}
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    identity = identify(RunConfig(), "local", data={}, environ=environ)
    monkeypatch.undo()
    assert "hunter2" not in json.dumps(identity)
    made = spec(json.loads(json.dumps(identity)))
    assert prepare(made).agent == "/opt/venv/bin/python -P -u -m trainer.agent.main"
    own = {"PATH": "/bin", "VIRTUAL_ENV": "/home/ann/other", "SLURM_JWT": "mine"}
    assert made.submitter.environ(own) == {"PATH": "/opt/bin:/bin", "SLURM_JWT": "mine", "PYTHONUTF8": "1"}


@pytest.mark.parametrize("identity", [{}, {"job": None}, {"job": {"python": "/bin/python"}}, {"job": {"variables": 1}}])
def test_a_run_without_such_a_record_takes_what_the_controller_has(identity: dict[str, object]) -> None:
    made = spec(identity)
    assert prepare(made).agent == f"{sys.executable} -P -u -m trainer.agent.main"
    assert made.submitter.environ({"PATH": str(Path("/bin")), "EDITOR": "vi"}) == {"PATH": "/bin", "PYTHONUTF8": "1"}
