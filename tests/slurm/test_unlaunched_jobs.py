"""Nodes of the real Slurm that cannot launch a job: the run names them and continues elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
LONG = [
    "command=[sleep, '600']", "cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.time=10", "recovery.backoff=0.5",
]  # fmt: skip


@pytest.fixture
def sick(lab: SlurmLab) -> Iterator[str]:
    node, mark = lab.nodes[0], lab.folder / f"sick-{lab.nodes[0]}"
    mark.touch()
    yield node
    mark.unlink(missing_ok=True)
    lab.ask("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_container_runtime_that_nodes_lack_is_named(user: User) -> None:
    words = ["cluster.nodes=2", "cluster.templates=[default,apptainer]", "recovery.max_failures=1"]
    args = ["+cluster.template_args.image=/no.sif", "+cluster.template_args.program=apptainer-nonesuch"]
    run = user.submit("torchrun-script", *LONG, *words, *args)["run"]
    assert user.wait(run, 60) == 8
    found = failure(user, run, 1)
    assert (found["kind"], found["node"]) == ("launch_failed", None)
    assert "apptainer-nonesuch was not found on n" in found["reason"]
    assert "apptainer-nonesuch was not found on n" in user.status(run)["reason"]


def failure(user: User, run: str, attempt: int) -> dict[str, Any]:
    found: dict[str, Any] = user.show(run)["attempts"][attempt - 1]["failure"]
    return found


def test_failing_prolog_and_cancelled_job(lab: SlurmLab, user: User, sick: str) -> None:
    run = user.submit("torchrun-script", *LONG)["run"]

    def goes_on() -> bool:
        shown = user.show(run)
        return len(shown["attempts"]) == 2 and shown["state"] == "RUNNING"

    user.until(goes_on, 120, "a second attempt")
    unlaunched = failure(user, run, 1)
    assert (unlaunched["kind"], unlaunched["node"]) == ("launch_failed", sick)
    # slurmd 26.05 does not write the cause into the job's log.
    assert "slurm prolog" in unlaunched["reason"] or "see its slurmd's log" in unlaunched["reason"]

    lab.ask("scancel", user.status(run)["job_id"])
    user.until(lambda: user.status(run)["state"] == "HELD", 90, "the run to be held")
    assert failure(user, run, 2)["kind"] == "cancelled"
