"""Outages on the real Slurm: a temporary limit, nodes that do not boot; the run waits and finishes unattended."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab, _free_ports, temporary_lab

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.timeout(600)]
SMALL = [
    "cluster.nodes=1", "cluster.cpus_per_task=2", "cluster.time=10", "recovery.backoff=1", "recovery.backoff_max=4",
    "train.steps=20", "checkpoint.every=8", "parallel.tp=1", "parallel.dp_shard=0",
]  # fmt: skip
RESUME = """#!/bin/sh
# What a site's ResumeProgram does: boot the node, or, when that does not work, give it up.
export SLURM_CONF={conf} PATH={path}
if [ -e {folder}/broken ]; then
  exit 1
fi
# -b: it says that its machine has just been booted, which slurmctld waits for.
setsid {slurmd} -D -b -N c1 </dev/null >> {folder}/log/slurmd-c1.out 2>&1 &
"""
SUSPEND = """#!/bin/sh
kill $(cat {folder}/slurmd-c1.pid)
"""


def settings(folder: Path) -> str:
    """Return settings that enforce limits and define one node that boots on demand."""
    host, (port,) = socket.gethostname().partition(".")[0], _free_ports(1)
    return "\n".join(
        [
            "AccountingStorageEnforce=associations,limits,qos",
            f"ResumeProgram={folder}/resume",
            f"SuspendProgram={folder}/suspend",
            "SuspendTime=600",
            "SuspendTimeout=2",
            "ResumeTimeout=20",
            "SuspendExcNodes=n1",
            "SlurmctldParameters=idle_on_node_suspend",
            f"NodeName=c1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 State=CLOUD",
            "PartitionName=cloud Nodes=c1 MaxTime=INFINITE",
            "",
        ]
    )


@pytest.fixture(scope="module")
def strict(suite: str) -> Iterator[SlurmLab]:
    def add_cloud(lab: SlurmLab) -> None:
        lab.extra = settings(lab.folder)
        (lab.folder / "spool" / "c1").mkdir(parents=True)
        places = {"folder": lab.folder, "conf": lab.conf, "path": lab.environment()["PATH"]}
        for name, text in (("resume", RESUME), ("suspend", SUSPEND)):
            (lab.folder / name).write_text(text.format(slurmd=" ".join(["slurmd", *lab.slurm.step_daemon()]), **places))
            (lab.folder / name).chmod(0o755)

    with temporary_lab(suite, add_cloud, nodes=1) as lab:
        yield lab


@pytest.fixture
def user(strict: SlurmLab, tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "slurm", strict.environment())
    yield someone
    someone.leave()
    strict.ask("scancel", "--me")
    someone.until(lambda: not strict.ask("squeue", "-h", "--me").stdout.strip(), 60, "an empty queue")


SHORT, LONG = 25, 130


def waits(user: User, run: str, words: str) -> None:
    """Wait until the run is between two attempts, with these words in its reason."""

    def said() -> bool:
        row = user.status(run)
        return row["state"] == "RECOVERING" and words in row["reason"] and "next try at" in row["reason"]

    user.until(said, 60, words)


@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_a_limit_of_a_qos_that_passes(strict: SlurmLab, user: User, seconds: int) -> None:
    for words in (
        ("add", "qos", "one", "MaxSubmitJobsPerUser=1"), ("add", "account", "test"),
        ("add", "user", "root", "account=test"), ("modify", "user", "root", "set", "qos+=one"),
    ):  # fmt: skip
        strict.ask("sacctmgr", "-i", *words)

    def occupied() -> str:
        job = ["sbatch", "--parsable", "-q", "one", "-p", "low", "-o", "/dev/null", "--wrap", "sleep 900"]
        return strict.ask(*job).stdout.strip()

    other, end = user.until(occupied, 30, "the other job, once slurmctld knows the QOS"), time.monotonic() + seconds
    run = user.submit("tiny-gpt", *SMALL, "cluster.partition=low", "cluster.qos=one")["run"]
    waits(user, run, "QOSMaxSubmitJobPerUserLimit")
    user.until(lambda: time.monotonic() > end, seconds + 10, "the end of the outage")
    strict.ask("scancel", other)
    assert user.wait(run) == 0
    *refused, last = user.show(run)["attempts"]
    assert {attempt["failure"]["kind"] for attempt in refused} == {"submit_deferred"}
    assert last["failure"] is None


@pytest.mark.parametrize("seconds", [LONG])
def test_a_node_that_does_not_boot_for_a_while(strict: SlurmLab, user: User, seconds: int) -> None:
    def state() -> str:
        return strict.ask("sinfo", "-h", "-N", "-n", "c1", "-p", "cloud", "-o", "%T").stdout.strip()

    if state() != "idle~":
        strict.ask("scontrol", "update", "nodename=c1", "state=power_down_force")
        user.until(lambda: state() == "idle~", 60, "the node to be off")
    broken, end = strict.folder / "broken", time.monotonic() + seconds
    broken.touch()
    run = user.submit("tiny-gpt", *SMALL, "cluster.partition=cloud")["run"]

    def booted() -> bool:
        # What a site does about a node that did not come up: it is put back into service, and tried again.
        if state().startswith("down"):
            strict.ask("scontrol", "update", "nodename=c1", "state=resume")
        if time.monotonic() > end and len(user.show(run)["attempts"]) > 1:
            broken.unlink(missing_ok=True)
        return bool(user.step(run) > 0)

    user.until(booted, seconds + 250, "training on the node that boots at last")
    assert user.wait(run) == 0
    *lost, last = user.show(run)["attempts"]
    assert lost
    assert {attempt["failure"]["kind"] for attempt in lost} <= {"node_lost", "launch_failed"}
    assert last["failure"] is None
