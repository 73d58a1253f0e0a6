"""The lab leaves no processes behind, even if its owner is killed, and ordinary users can submit to it."""

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.orchestrator.scheduler.contract import eventually
from tests.slurm import processes
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


def test_a_killed_owner_leaves_no_daemon_behind(lab: SlurmLab, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    command = [sys.executable, "-m", "tests.slurm.lab", "start", str(folder)]
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


def test_an_ordinary_user_can_submit(lab: SlurmLab) -> None:
    somebody = pwd.getpwnam("nobody")
    reachable = subprocess.run(
        ["test", "-r", str(lab.conf)], user=somebody.pw_uid, group=somebody.pw_gid, check=False
    ).returncode
    if reachable != 0:
        pytest.skip("the lab's folder is private to root here")
    with tempfile.TemporaryDirectory() as work:
        os.chown(work, somebody.pw_uid, somebody.pw_gid)
        sent = subprocess.run(
            ["sbatch", "--parsable", "-o", f"{work}/out", "--wrap", "id -un"], cwd=work, env=lab.environment(),
            user=somebody.pw_uid, group=somebody.pw_gid, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert sent.returncode == 0, sent.stderr
        deadline = time.monotonic() + 30
        while "COMPLETED" not in lab.ask("squeue", "-h", "-t", "all", "-j", sent.stdout, "-o", "%T").stdout:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert Path(work, "out").read_text() == "nobody\n"
