"""What sbatch gets from orch: its whole environment, and none of it on a command line that others can read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.slurm import sbatch
from orchestrator.scheduler.slurm.sbatch import with_environment
from tests.fakes.slurm_commands import write_commands

CANARY = "canary-12345"
LOOK = """
cat > /dev/null < "${1:-/dev/null}"
env > @/environment
for process in /proc/[0-9]*; do
    [ "$process" = "/proc/$$" ] || { tr '\\0' ' ' < $process/cmdline; echo; } 2> /dev/null
done > @/command-lines
echo "Submitted batch job 7"
"""
"""An sbatch that writes down what it sees, and what every user sees of all processes meanwhile."""


def test_exactly_this_environment_arrives_and_no_word_of_it_is_on_the_command_line() -> None:
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
    """A job whose submitter had variables of his own, and an sbatch that looks around."""
    path = write_commands(tmp_path / "bin", LOOK.replace("@", str(tmp_path)))
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


def test_sbatch_sees_the_submitters_environment_and_nobody_else_does(spec: JobSpec, tmp_path: Path) -> None:
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
