"""A torchrun script in an image without orch, on the real Slurm."""

import os
import signal
from pathlib import Path

import pytest

from tests import image
from tests.end_to_end.test_containers import facts, step
from tests.end_to_end.user import User
from tests.slurm import processes
from tests.slurm.lab import SlurmLab

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slurm,
    pytest.mark.multi,
    pytest.mark.skipif(not image.is_possible(), reason="mount namespaces need root"),
]
SHAPE = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.cpus_per_task=2", "cluster.partition=low",
    "cluster.time=30", "recovery.backoff=0.2",
]  # fmt: skip


def test_slurms_signal_and_a_dead_rank_in_an_image_without_orch(lab: SlurmLab, user: User, tmp_path: Path) -> None:
    root, folder = tmp_path / "image", tmp_path / "work"
    folder.mkdir()
    image.make_image(root)
    run = user.submit("torchrun-script", *SHAPE, *image.settings(root, folder))["run"]
    user.until(lambda: step(folder) > 3, 180, "steps")
    first = facts(folder, 1)
    assert (first["image"], first["python"], first["found"]) == (True, image.PYTHON, [])

    os.kill(int(str(first["pid"])), signal.SIGKILL)
    user.until(lambda: facts(folder, 1)["pid"] != first["pid"], 180, "a restart in place")
    user.until(lambda: step(folder) > int(str(facts(folder, 1)["first"])), 180, "further steps")
    user.until(lambda: user.status(run)["step"] > 0, 60, "the controller to read the steps")
    status = user.status(run)
    assert status["attempts"] == 1

    mine = processes.job_processes(lab.conf)
    assert int(str(facts(folder, 0)["child"])) in mine
    signalled = lab.ask("scancel", "--signal=USR2", str(status["job_id"]))  # as Slurm does before the time limit
    assert signalled.returncode == 0, signalled.stderr
    user.until(lambda: all((folder / f"rank-{rank}.term").exists() for rank in range(2)), 180, "SIGTERM in both ranks")
    (folder / "stop").touch()  # the next job ends at once
    assert user.wait(run) == 0
    assert not processes.wait_gone(mine, 30)
