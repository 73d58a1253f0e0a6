"""Nodes that cannot launch a job, on the real Slurm: the run names them and goes on elsewhere."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
SHORT = [f"command=[{sys.executable!r}, '-c', 'pass']", "cluster.ranks_per_node=1", "cluster.time=10"]


@pytest.fixture
def sick(lab: SlurmLab) -> Iterator[str]:
    """A node whose prolog fails, which Slurm drains at the first job."""
    node, mark = lab.nodes[0], lab.folder / f"sick-{lab.nodes[0]}"
    mark.touch()
    yield node
    mark.unlink(missing_ok=True)
    lab.ask("scontrol", "update", f"nodename={node}", "state=resume")


def first_end(user: User, run: str) -> dict[str, Any]:
    found: dict[str, Any] = user.show(run)["attempts"][0]["failure"]
    return found


def test_a_node_whose_prolog_fails_is_named_and_the_run_goes_on(lab: SlurmLab, user: User, sick: str) -> None:
    run = user.submit("torchrun-script", *SHORT, "cluster.nodes=1", "recovery.backoff=0.5")["run"]
    assert user.wait(run) == 0
    failure = first_end(user, run)
    assert (failure["kind"], failure["node"]) == ("launch_failed", sick)
    assert "slurm prolog" in failure["reason"]


def test_a_person_who_cancels_the_job_ends_the_run(lab: SlurmLab, user: User) -> None:
    wait = f"command=[{sys.executable!r}, '-c', 'import time; time.sleep(200)']"
    run = user.submit("torchrun-script", *SHORT, wait, "cluster.nodes=1")["run"]
    user.until(lambda: user.status(run)["state"] == "RUNNING", 90, "the run to run")
    lab.ask("scancel", user.status(run)["job_id"])
    user.until(lambda: user.status(run)["state"] == "HELD", 90, "the run to be held")
    assert first_end(user, run)["kind"] == "cancelled"
