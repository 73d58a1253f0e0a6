"""A controller on the real Slurm whose SLURM_CONF has been deleted."""

import shutil
import sys

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
SHAPE = ["cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.time=10", "recovery.backoff=0.5"]


def waits(seconds: int) -> str:
    return f"command=[{sys.executable!r}, '-c', 'import time; time.sleep({seconds})']"


@pytest.mark.proof
def test_submit_despite_a_controller_with_a_stale_environment(lab: SlurmLab, user: User) -> None:
    copy = user.folder / "copy.conf"
    shutil.copy(lab.conf, copy)
    right = user.environment["SLURM_CONF"]
    user.environment["SLURM_CONF"] = str(copy)
    first = user.submit("torchrun-script", waits(120), *SHAPE)
    assert first["job_id"] is not None
    copy.unlink()
    user.environment["SLURM_CONF"] = right
    second = user.submit("torchrun-script", waits(1), *SHAPE)["run"]
    user.until(lambda: user.status(second)["job_id"], 120, "a job of the second run")
    (controller,) = [one for one in user.ask("controller", "status")["controllers"] if one["alive"]]
    assert controller["silence"] == ""
    user.until(lambda: user.status(first["run"])["state"] == "RUNNING", 120, "the first run to be followed, too")
    assert user.wait(second) == 0
