"""Refusals of a real Slurm before a run exists, and jobs that would wait forever, with their remedies."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.scheduler.slurm.refusals import STAYS
from tests.end_to_end.user import TINY, User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.multi]
SMALL = [
    "cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.partition=low",
    "cluster.time=10",
]  # fmt: skip
TRAINS = ("tiny-gpt", *TINY, "parallel.tp=1", "parallel.dp_shard=0", "train.steps=2")
SLEEPS = ("torchrun-script", "command=[sleep, '600']")
NO_TEST = """#!/bin/sh
case " $* " in
*" --test-only "*) echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
esac
exec {sbatch} "$@"
"""
"""sbatch of a site on which --test-only gives no answer."""


def submit(user: User, what: tuple[str, ...], *overrides: str) -> list[str]:
    preset, *words = what
    return ["submit", preset, f"cluster.root={user.root}", "--cluster", "slurm", *SMALL, *words, *overrides]


REFUSED = [
    ("cluster.partition=lov", "Invalid partition name specified", "type cluster.partition=low"),
    ("cluster.mem=8G", "Requested node configuration is not available", "type cluster.mem=4000M"),
    ("cluster.cpus_per_task=9", "Requested node configuration is not available", "type cluster.cpus_per_task=8"),
    ("cluster.spare_nodes=8", "Requested node configuration is not available", "type cluster.spare_nodes=2"),
    ("cluster.constraint=h100", "Invalid feature specification", "type cluster.constraint=FEATURE"),
    ("cluster.exclude=n[3,9]", "cluster.exclude names n9, which Slurm does not know", "type cluster.exclude=n3"),
    ("+cluster.sbatch.licenses=matlab:1", "Invalid license specification", "type cluster.sbatch.licenses=NAME"),
    ("+cluster.sbatch.gres=disk:1", "Invalid generic resource", "type cluster.sbatch.gres=NAME:NUMBER"),
    ("+cluster.sbatch.bogus=1", "unrecognized option '--bogus=1'", "type ~cluster.sbatch.bogus"),
]


def test_refusals_by_slurm_make_no_run(lab: SlurmLab, user: User) -> None:
    for override, said, typed in REFUSED:
        spare = ("cluster.nodes=2", "cluster.ranks_per_node=1") if "spare" in override else ()
        done = user.run(*submit(user, TRAINS, *spare, override))
        assert done.returncode == 4, done.stderr
        assert said in done.stderr
        assert typed in done.stderr
    assert user.ask("status") == []
    assert not lab.ask("squeue", "-h", "--me").stdout.strip()


@contextmanager
def longest(lab: SlurmLab, minutes: str) -> Iterator[None]:
    """Set the partition's maximum time limit."""
    lab.ask("scontrol", "update", "partitionname=low", f"maxtime={minutes}")
    try:
        yield
    finally:
        lab.ask("scontrol", "update", "partitionname=low", "maxtime=infinite")


def test_a_held_run_and_a_job_that_waits_for_ever_name_commands_that_cure_them(lab: SlurmLab, user: User) -> None:
    programs = user.folder / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(NO_TEST.format(sbatch=shutil.which("sbatch", path=user.environment["PATH"])))
    (programs / "sbatch").chmod(0o755)
    user.environment["PATH"] = f"{programs}:{user.environment['PATH']}"
    done = user.run(*submit(user, SLEEPS, "cluster.partition=lov"))
    assert done.returncode == 8, done.stderr
    (row,) = user.ask("status")
    reason, _, cure = row["reason"].rpartition("; ")
    assert "invalid partition specified: lov" in reason
    assert "partitions here: low, high" in reason
    run = row["run"]
    assert cure == f"orch resume {run} cluster.partition=low"

    with longest(lab, "5"):
        assert user.run(*shlex.split(cure)[1:]).returncode == 0
        user.until(lambda: STAYS in user.status(run)["reason"], 90, "a reason that stays")
        reason = user.status(run)["reason"]
        assert "PENDING (PartitionTimeLimit): cluster.time is longer than allowed here" in reason
        cancel, resume = (words.strip("`") for words in reason.rpartition("; ")[2].split(", then "))
        assert user.run(*shlex.split(cancel)[1:]).returncode == 0
        user.until(lambda: user.status(run)["state"] == "CANCELLED", 60, "a cancelled run")
        assert user.run(*shlex.split(resume.replace("MINUTES", "4"))[1:]).returncode == 0
        user.until(lambda: user.status(run)["state"] == "RUNNING", 90, "a run that is cured")
    assert user.run("cancel", run).returncode == 0


def test_nodes_that_are_down_are_no_refusal_and_one_that_is_back_trains(lab: SlurmLab, user: User) -> None:
    lab.ask("scontrol", "update", "nodename=n[1-4]", "state=drain", "reason=test")
    try:
        done = user.run(*submit(user, TRAINS, "--json"))
        assert done.returncode == 0, done.stderr
        assert "slurm_refuses_now" in done.stdout
        (row,) = user.ask("status")
        user.until(lambda: "nodes that it needs are down" in user.status(row["run"])["reason"], 90, "why it waits")
    finally:
        lab.ask("scontrol", "update", "nodename=n[1-4]", "state=resume")
    assert user.wait(row["run"]) == 0
