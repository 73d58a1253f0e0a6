"""The lab leaves no processes behind, even if its owner is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestrator.scheduler.contract import eventually
from tests.slurm import processes
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


def test_a_killed_owner_leaves_no_daemon_behind(lab: SlurmLab, suite: str, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    command = [sys.executable, "-m", "tests.slurm.lab", "start", str(folder), "--suite", suite]
    owner = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert "SLURM_CONF" in owner.stdout.readline()
        assert list(processes.using(folder))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close() if owner.stdout else None
    eventually(lambda: not list(processes.using(folder)), "everything is gone", 20)
    assert set(lab.ask("sinfo", "-h", "-o", "%t").stdout.split()) == {"idle"}
