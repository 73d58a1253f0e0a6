"""`orch doctor --locks`: what it says, and what it leaves beside the registry."""

import os
from pathlib import Path

import pytest

from orchestrator.registry.locks import filesystem
from orchestrator.registry.locks.filesystem import Mount
from tests.orchestrator.cli.conftest import Type


@pytest.fixture
def beegfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's folder is one of BeeGFS."""
    mount = Mount(point="/x", kind="beegfs", options=frozenset({"rw"}), source="beegfs_nodev")
    monkeypatch.setattr(filesystem, "mounted", lambda path: mount)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """First on PATH, and the rest without Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def check(orch: Type, *words: str) -> dict[str, str]:
    """The finding of that name."""
    seen = orch("doctor", "--json", *words)
    return next(each for each in seen.data["checks"] if each["name"] == "locks")


def test_no_other_host_is_asked_of_a_local_disk(orch: Type, bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = Mount(point="/", kind="ext4", options=frozenset())
    monkeypatch.setattr(filesystem, "mounted", lambda path: local)
    program(bin_folder / "ssh", "exit 9")
    found = check(orch, "--peer", "node7")
    assert (found["level"], "ext4 belongs to one host" in found["text"]) == ("ok", True)


@pytest.mark.usefixtures("beegfs")
def test_another_host_is_asked_by_ssh_and_this_machine_is_none(orch: Type, bin_folder: Path) -> None:
    """This ssh goes nowhere: its shell runs what it is told here."""
    program(bin_folder / "ssh", 'for last; do :; done; exec sh -c "$last"')
    found = check(orch, "--peer", "node7")
    assert found["level"] == "fail"
    assert "is this same machine: only another one proves anything" in found["text"]


@pytest.mark.usefixtures("beegfs")
def test_a_host_that_does_not_answer_is_told(orch: Type, bin_folder: Path) -> None:
    program(bin_folder / "ssh", 'echo "ssh: connect to host node7 port 22: No route to host" >&2; exit 255')
    found = check(orch, "--peer", "node7")
    assert found["level"] == "fail"
    assert "No route to host" in found["text"]


@pytest.mark.usefixtures("beegfs", "bin_folder")
def test_without_slurm_a_peer_must_be_named(orch: Type) -> None:
    found = check(orch, "--locks")
    assert (found["level"], found["hint"]) == ("fail", "orch doctor --peer HOST")


@pytest.mark.usefixtures("beegfs", "bin_folder")
def test_doctor_refuses_the_place_and_says_how_to_prove_it(orch: Type) -> None:
    seen = orch("doctor", "--json")
    found = next(each for each in seen.data["checks"] if each["name"] == "registry")
    assert seen.code == 4
    assert "tuneUseGlobalFileLocks" in found["text"]
    assert "orch doctor --locks" in found["hint"]
    assert not [name for name in os.listdir(os.environ["ORCH_HOME"]) if name.endswith((".probe", ".lock"))]
