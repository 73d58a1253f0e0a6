"""A job's nodes are prepared before its ranks start: staged interpreter, caches, cores."""

import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from trainer.agent.nodes.node_setup import prepare_node
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.node_setup_config import StageConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode, FailureKind
from trainer.protocol.rank_variables import node_caches, rank_caches, rank_python

PROGRAM = """
import json, os, sys, tempfile
names = ("TMPDIR", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "ORCH_STAGE", "STAGED_BY", "PATH")
note = {"rank": os.environ["RANK"], "temp": tempfile.gettempdir(), "cores": sorted(os.sched_getaffinity(0)),
        **{name: os.environ.get(name) for name in names}}
with open("notes", "a") as file:
    file.write(json.dumps(note) + "\\n")
"""
STAGED_PYTHON = f'#!/bin/sh\nSTAGED_BY=archive exec {sys.executable} "$@"\n'


def notes(folder: Path) -> list[dict[str, str]]:
    found = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return sorted(found, key=lambda note: int(note["rank"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def stage(tmp_path: Path) -> dict[str, str]:
    """Make an archive with an interpreter of its own, and return the keys that stage it."""
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAGED_PYTHON)
    python.chmod(0o755)
    archive = tmp_path / "env.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tmp_path / "env", "env")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return {"archive": str(archive), "to": str(tmp_path / "disk"), "sha256": digest}


def script(folder: Path, **cluster: object) -> dict[str, object]:
    return {"command": ["python", "train.py"], "env": {"ORCH_SUBMIT_DIR": str(folder)}, "cluster": cluster}


def test_a_program_runs_with_the_interpreter_of_the_staged_archive(job, folder, stage):
    work = job(nodes=2, ranks=1, **script(folder, stage=stage)).ends(0, 0)
    seen = notes(folder)
    assert {note["STAGED_BY"] for note in seen} == {"archive"}
    (place,) = {note["ORCH_STAGE"] for note in seen}
    assert Path(place).is_relative_to(folder / "disk")
    assert seen[0]["PATH"].split(":")[0] == f"{place}/bin"
    prepared = work.events(EventKind.NODE_PREPARED)
    assert sorted(event.data["reused"] for event in prepared) == [False, True]
    assert {event.data["staged"] for event in prepared} == {place}


def test_a_damaged_archive_ends_the_run_with_the_reason(job, folder, stage):
    work = job(nodes=2, ranks=1, **script(folder, stage={**stage, "sha256": "0" * 64}))
    work.ends(ExitCode.NEVER_RETRY, ExitCode.NEVER_RETRY)
    failure = work.outcome().failure
    assert failure is not None
    assert failure.kind is FailureKind.INSTALLATION
    assert "env.tar is damaged or has changed" in failure.reason


def test_a_staged_interpreter_that_cannot_start_is_a_fault_with_a_reason(folder, stage):
    (folder / "env" / "bin" / "python").write_bytes(b"\x7fELF of another kind of machine")
    with tarfile.open(stage["archive"], "w") as file:
        file.add(folder / "env", "env")
    digest = hashlib.sha256(Path(stage["archive"]).read_bytes()).hexdigest()
    config = JobConfig(cluster=ClusterShape(stage=StageConfig(**{**stage, "sha256": digest})))
    _, (fault,) = prepare_node(config, "r-1", dict(os.environ), None)
    assert "env.tar cannot run workloads" in fault.reason
    assert fault.reason.endswith("Exec format error; pack an environment of this kind of node")


def test_caches_are_on_the_nodes_disk_and_compilers_have_their_own_for_each_rank(job, folder, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # set by torch in a process that has compiled
    work = job(nodes=2, ranks=2, **script(folder, caches=str(folder / "disk")))
    work.start(environ={"HF_HOME": "/mine", "TMPDIR": "/tmp"})
    work.ends(0, 0)
    seen = notes(folder)
    assert {note["HF_HOME"] for note in seen} == {"/mine"}
    assert {note["temp"] for note in seen} == {seen[0]["TMPDIR"]}
    assert Path(seen[0]["TMPDIR"]).is_relative_to(folder / "disk")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert len({note[name] for note in seen}) == 4
    (variables,) = {json.dumps(event.data["variables"]) for event in work.events(EventKind.NODE_PREPARED)}
    assert json.loads(variables)["TMPDIR"] == seen[0]["TMPDIR"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("bind", ["auto", "off"])
def test_ranks_are_bound_to_their_share_of_the_jobs_cores(job, folder, bind):
    before = os.sched_getaffinity(0)
    mine = sorted(before)[:2]
    os.sched_setaffinity(0, mine)
    try:
        work = job(nodes=1, ranks=2, **script(folder, bind=bind)).ends(0)
    finally:
        os.sched_setaffinity(0, before)
    bound = [[mine[0]], [mine[1]]] if bind == "auto" else [mine, mine]
    assert [note["cores"] for note in notes(folder)] == bound
    (event,) = work.events(EventKind.RANKS_BOUND)
    assert event.data["cores"] == ({"0": str(mine[0]), "1": str(mine[1])} if bind == "auto" else {"0": "", "1": ""})


def test_what_the_user_has_set_is_kept(tmp_path):
    assert node_caches(tmp_path, {"TMPDIR": "/t", "HF_HOME": "/h"}) == {"ORCH_CACHES": str(tmp_path)}
    assert rank_caches(1, {"ORCH_CACHES": "/c", "TRITON_CACHE_DIR": "/t"}) == {
        "TORCHINDUCTOR_CACHE_DIR": "/c/rank-1/inductor"
    }
    assert rank_caches(1, {}) == {}
    assert rank_python({}) == sys.executable


def test_an_offline_job_keeps_its_models_and_a_moved_home_keeps_the_token(tmp_path):
    assert "HF_HOME" not in node_caches(tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert node_caches(tmp_path, {"HF_HUB_OFFLINE": "0"})["HF_HOME"] == str(tmp_path / "huggingface")
    token = tmp_path / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.touch()
    assert node_caches(tmp_path, {"HOME": str(tmp_path)})["HF_TOKEN_PATH"] == str(token)
