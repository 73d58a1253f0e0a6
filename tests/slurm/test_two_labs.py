"""Two real Slurms with one name and one home: each run stays in its own, whichever controller is alive."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.recovery.classify_failure import LOST_AFTER
from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab, temporary_lab

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.timeout(400)]
SMALL = [
    "cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.partition=low",
    "parallel.dp_shard=1", "parallel.tp=1",
    "cluster.time=10", "recovery.backoff=0.5", "checkpoint.every=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def other(suite: str) -> Iterator[SlurmLab]:
    with temporary_lab(suite, nodes=1) as made:
        yield made


def jobs(lab: SlurmLab, run: str) -> list[str]:
    """Return all jobs that this Slurm has had for a run."""
    listed = lab.ask("sacct", "-X", "-n", "-P", "-S", "now-1hours", "-o", "JobName").stdout.split()
    queued = lab.ask("squeue", "-h", "-t", "all", "-o", "%j").stdout.split()
    return sorted({name for name in (*listed, *queued) if name.startswith(f"orch-{run}-")})


def controllers(user: User) -> dict[str, bool]:
    return {one["scheduler"]: one["alive"] for one in user.ask("controller", "status")["controllers"]}


def test_two_slurms_of_one_name_share_a_home(lab: SlurmLab, other: SlurmLab, user: User, tmp_path: Path) -> None:
    there = User(tmp_path, "slurm", other.environment())
    every = f"nodename={','.join(lab.nodes)}"
    lab.ask("scontrol", "update", every, "state=drain", "reason=full")
    try:
        _two_runs_one_without_a_controller(lab, other, user, there, every)
    finally:
        lab.ask("scontrol", "update", every, "state=resume")


def _two_runs_one_without_a_controller(lab: SlurmLab, other: SlurmLab, user: User, there: User, every: str) -> None:
    """The first run's job waits for drained nodes until the second run has ended."""
    # Other tests have jobs in this lab, too: these runs have names of their own.
    mine = user.submit("tiny-gpt", *SMALL, "name=one-home", "train.steps=8")["run"]
    theirs = there.submit("tiny-gpt", *SMALL, "name=other-home", "train.steps=8")["run"]
    rows = {row["run"]: row for row in user.ask("status")}
    names = [rows[run]["slurm_cluster"] for run in (mine, theirs)]
    assert len(set(names)) == 2
    assert all(name.startswith("lab@") for name in names)
    assert controllers(user) == dict.fromkeys(names, True)

    # The controller of the first one dies; that of the second one looks at every run of the registry meanwhile.
    (victim,) = [one["pid"] for one in user.ask("controller", "status")["controllers"] if one["scheduler"] == names[0]]
    next(process for process in user.processes("orch-controller") if process.pid == victim).kill()
    assert there.wait(theirs) == 0
    assert there.run("controller", "tick").returncode == 0
    refused = there.run("wait", mine, "--timeout", "60")
    assert refused.returncode == 4, refused.stderr
    assert f"no controller for {names[0]} is running" in refused.stderr
    assert f"on a login node of {names[0]}" in refused.stderr
    assert [len(jobs(slurm, run)) for slurm in (lab, other) for run in (mine, theirs)] == [1, 0, 0, 1]

    lab.ask("scontrol", "update", every, "state=resume")
    assert user.wait(mine) == 0
    for run in (mine, theirs):
        assert [attempt["attempt"] for attempt in user.show(run)["attempts"]] == [1]
    assert [len(jobs(slurm, run)) for slurm in (lab, other) for run in (mine, theirs)] == [1, 0, 0, 1]


@pytest.mark.proof
def test_a_controller_is_switched_to_the_other_slurm_and_back(lab: SlurmLab, other: SlurmLab, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    shutil.copyfile(lab.conf, conf)
    user = User(tmp_path, "slurm", {**lab.environment(), "SLURM_CONF": str(conf)})
    every = f"nodename={','.join(lab.nodes)}"
    lab.ask("scontrol", "update", every, "state=drain", "reason=full")
    try:
        run = user.submit("tiny-gpt", *SMALL, "train.steps=8", "name=switched")["run"]
        first = user.status(run)["slurm_cluster"]
        shutil.copyfile(other.conf, conf)
        user.until(lambda: controllers(user).get(first) is False, 60, "the lease to be given back")
        # Whoever asks the wrong Slurm about a silent job calls it lost after this time.
        time.sleep(LOST_AFTER + 15)
        assert user.run("controller", "tick").returncode == 0
        assert jobs(other, run) == []
        shutil.copyfile(lab.conf, conf)
        lab.ask("scontrol", "update", every, "state=resume")
        assert user.wait(run) == 0
        assert [attempt["slurm_cluster"] for attempt in user.show(run)["attempts"]] == [first]
        assert len(jobs(lab, run)) == 1
    finally:
        lab.ask("scontrol", "update", every, "state=resume")
        user.leave()


@pytest.mark.proof
def test_a_name_outlives_restart_and_reconfiguration(other: SlurmLab, tmp_path: Path) -> None:
    user = User(tmp_path, "slurm", other.environment())
    try:
        runs = [user.submit("tiny-gpt", *SMALL, "train.steps=1")["run"]]
        other.kill_controller()
        other.start_controller()
        other.ask("scontrol", "reconfigure")
        runs.append(user.submit("tiny-gpt", *SMALL, "train.steps=1")["run"])
        assert [user.wait(run) for run in runs] == [0, 0]
        assert len({user.status(run)["slurm_cluster"] for run in runs}) == 1
    finally:
        user.leave()
