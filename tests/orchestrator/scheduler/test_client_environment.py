"""Environments that select a Slurm, and their handover to sbatch."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.slurm import sbatch
from orchestrator.scheduler.slurm.client_environment import ClientEnvironment
from orchestrator.scheduler.slurm.sbatch import with_environment
from tests.fakes.slurm_commands import write_commands


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
    assert one.differences(other) == ["SLURM_JWT is different"]
    assert not one.can_replace(other), "it cannot be handed on"


@pytest.mark.parametrize("fields", [None, {}, {"variables": 3}, {"variables": {}}, [], "x"])
def test_invalid_records_count_as_none(fields: object) -> None:
    assert ClientEnvironment.from_json(fields) is None


def test_differences_are_described(tmp_path: Path) -> None:
    sbatch = program(tmp_path / "bin")
    one = ClientEnvironment(variables={"SLURM_CONF": "/a"}, sbatch=sbatch)
    other = ClientEnvironment(variables={"SLURM_CLUSTERS": "far"})
    assert one.differences(other) == [
        "SLURM_CONF is /a, not unset", "SLURM_CLUSTERS is unset, not far",
        f"sbatch is {sbatch}, not missing from PATH",
    ]  # fmt: skip
    assert one.differences(one) == []
    assert one.can_replace(other)


def test_taking_over_changes_only_which_slurm_is_used(tmp_path: Path) -> None:
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


CANARY = "canary-12345"
LOOK = """
cat > /dev/null < "${1:-/dev/null}"
env > @/environment
for process in /proc/[0-9]*; do
    [ "$process" = "/proc/$$" ] || { tr '\\0' ' ' < $process/cmdline; echo; } 2> /dev/null
done > @/command-lines
echo "Submitted batch job 7"
"""
"""An sbatch that records its environment, and the command lines that all users can see meanwhile."""


def test_the_environment_arrives_but_not_on_the_command_line() -> None:
    environ = {"A": "1", "EMPTY": "", "LINES": "a\nb=c", "BYTES": "\udcff", "PYTHONPATH": "/x", "LC_ALL": "C"}
    with with_environment(environ, ["/usr/bin/env", "-0"]) as words:
        assert not any(value in word for word in words[3:] for value in ("a\nb=c", "LINES"))
        done = subprocess.run(words, capture_output=True, check=True)
    assert dict(pair.split(b"=", 1) for pair in done.stdout.split(b"\0") if pair) == {
        os.fsencode(name): os.fsencode(value) for name, value in environ.items()
    }
    with with_environment({}, ["/bin/sh", "-c", "exit 3"]) as words:
        assert subprocess.run(words, check=False).returncode == 3


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    path = write_commands(tmp_path / "bin", LOOK.replace("@", str(tmp_path)), scancel="true")
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("SLURM_JWT", f"{CANARY}-jwt")
    monkeypatch.setenv("AWS_SECRET", f"{CANARY}-of-the-controller")
    variables = {"PATH": "/usr/bin:/bin", "ORCH_VALUE": f"{CANARY}-recorded"}
    run_dir = tmp_path / "run"
    submission = run_dir / "submission"
    submission.mkdir(parents=True)
    return JobSpec(
        name="orch-a-1", comment="orch:a/1/0", run_dir=run_dir, attempt=1, submission=submission,
        resources=Resources(nodes=1), submitter=Submitter(python=sys.executable, package_root="", variables=variables),
    )  # fmt: skip


def seen(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines() if "=" in line)


def test_only_sbatch_sees_the_submitters_environment(spec: JobSpec, tmp_path: Path) -> None:
    assert sbatch.submit(spec, "trainer.agent.main:run_agent") == "7"
    environment = seen(tmp_path)
    assert environment["ORCH_VALUE"] == f"{CANARY}-recorded"
    assert environment["SLURM_JWT"] == f"{CANARY}-jwt"
    assert environment["PATH"] == "/usr/bin:/bin", "although the sbatch that was called is not there"
    assert "AWS_SECRET" not in environment
    lines = (tmp_path / "command-lines").read_text()
    assert "timeout --kill-after=5" in lines, "the process that waits for sbatch was looked at, too"
    assert CANARY not in lines


def test_a_test_of_the_job_shows_as_little(spec: JobSpec, tmp_path: Path) -> None:
    assert sbatch.refusal(spec) is None
    assert seen(tmp_path)["ORCH_VALUE"] == f"{CANARY}-recorded"
    assert CANARY not in (tmp_path / "command-lines").read_text()
