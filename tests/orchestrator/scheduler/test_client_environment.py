"""What decides which Slurm the commands of a process reach, written down, compared and taken over."""

import os
import stat
from pathlib import Path

import pytest

from orchestrator.scheduler.slurm.client_environment import ClientEnvironment


def program(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sbatch"
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_secret_is_compared_and_never_written_down(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "SLURM_CONF": "/a", "SLURM_JWT": "eyJhbGciOi", "SBATCH_ACCOUNT": "mine"}
    one = ClientEnvironment.from_environ(environ)
    assert one.variables == {"SLURM_CONF": "/a"}
    assert "eyJhbGciOi" not in str(one.to_json())
    assert ClientEnvironment.from_json(one.to_json()) == one
    other = ClientEnvironment.from_environ({**environ, "SLURM_JWT": "eyJ0eXAiOi"})
    assert one.differences(other) == ["SLURM_JWT is another one"]
    assert not one.can_replace(other), "it cannot be handed on"


@pytest.mark.parametrize("fields", [None, {}, {"variables": 3}, {"variables": {}}, [], "x"])
def test_what_is_no_record_counts_as_none(fields: object) -> None:
    assert ClientEnvironment.from_json(fields) is None


def test_differences_are_told_in_words(tmp_path: Path) -> None:
    sbatch = program(tmp_path / "bin")
    one = ClientEnvironment(variables={"SLURM_CONF": "/a"}, sbatch=sbatch)
    other = ClientEnvironment(variables={"SLURM_CLUSTERS": "far"})
    assert one.differences(other) == [
        "SLURM_CONF is /a, not unset", "SLURM_CLUSTERS is unset, not far",
        f"sbatch is {sbatch}, not missing from PATH",
    ]  # fmt: skip
    assert one.differences(one) == []
    assert one.can_replace(other)


def test_taking_one_over_changes_what_says_which_slurm_is_meant_and_nothing_else(tmp_path: Path) -> None:
    sbatch, own = program(tmp_path / "new"), program(tmp_path / "old")
    environ = {"PATH": os.path.dirname(own), "SLURM_CONF": "/old", "SLURM_CLUSTERS": "far", "HOME": "/home/me"}
    ClientEnvironment(variables={"SLURM_CONF": "/new"}, sbatch=sbatch).take_over(environ)
    assert environ == {
        "PATH": os.pathsep.join([os.path.dirname(sbatch), os.path.dirname(own)]), "SLURM_CONF": "/new",
        "HOME": "/home/me",
    }  # fmt: skip
    # One that is found already, or is gone, leaves PATH as it is.
    for place in (sbatch, str(tmp_path / "gone" / "sbatch"), ""):
        before = dict(environ)
        ClientEnvironment(variables={"SLURM_CONF": "/new"}, sbatch=place).take_over(environ)
        assert environ == before
