"""Restore tests on the real Slurm: separate jobs of other sizes, started by a tick or by the daemon."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
SMALL = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "parallel.tp=1", "cluster.cpus_per_task=2", "cluster.partition=low",
    "cluster.time=10", "train.steps=12", "checkpoint.every=4", "checkpoint.keep=10",
]  # fmt: skip
GENEROUS = "restore_tests.budget=1000000"


def history_of(user: User, run: str) -> list[dict[str, Any]]:
    """Return the restore tests of a run, newest first."""
    return list(user.ask("restore-tests", "history", run))


def verdicts(user: User, run: str, count: int, seconds: float = 150) -> list[dict[str, Any]]:
    """Return the ended tests once there are `count`."""

    def ended() -> list[dict[str, Any]]:
        found = [test for test in history_of(user, run) if test["verdict"]]
        return found if len(found) >= count else []

    found: list[dict[str, Any]] = user.until(ended, seconds, f"{count} verdicts", every=1.0)
    return found


@pytest.mark.proof
def test_a_tick_tests_what_is_due_on_another_world_size(lab: SlurmLab, user: User) -> None:
    layouts = ["restore_tests.layouts=[1]", "+restore_tests.cluster.partition=high"]
    run = user.submit("tiny-gpt", *SMALL, GENEROUS, *layouts, controller=False)["run"]

    def ticked() -> list[dict[str, Any]]:
        user.run("controller", "tick")
        return [test for test in history_of(user, run) if test["verdict"]]

    (test,) = user.until(ticked, 200, "a verdict", every=1.0)
    assert (test["verdict"], test["layout"], test["step"]) == ("RESTORED", "1", 12), test
    assert test["evidence"]["compared"] == 1
    assert test["evidence"]["rto_seconds"] > 0
    job = user.show(test["test"])["attempts"][0]["job_id"]
    asked = lab.ask("sacct", "-n", "-X", "-P", "-j", job, "-o", "Partition,NNodes,State").stdout.strip()
    assert asked == "high|1|COMPLETED"
    assert "--nice=10000" in next(user.run_dir(test["test"]).attempt(1).submission.glob("*.sh")).read_text()
    assert user.run("controller", "tick").returncode == 0
    assert len(history_of(user, run)) == 1, "once after success"
    assert user.ask("ckpt", "ls", run)[0]["trust"] == "RESTORED"
    assert not any(row["pinned"] for row in user.ask("ckpt", "ls", run))


@pytest.mark.proof
def test_an_unfinished_test_is_due_again(lab: SlurmLab, user: User) -> None:
    run = user.submit("tiny-gpt", *SMALL)["run"]
    assert user.wait(run) == 0
    before = user.ask("ckpt", "ls", run)
    (begun,) = user.ask("ckpt", "restore-test", f"{run}@8", "--layout", "1")
    job = user.until(lambda: user.show(begun["test"])["attempts"][0]["job_id"], 60, "the test's job")
    user.until(lambda: lab.ask("squeue", "-h", "-j", job, "-t", "RUNNING").stdout.strip(), 60, "it runs")
    lab.ask("scancel", job)
    (test,) = verdicts(user, run, 1)
    assert test["verdict"] == "NOT_FINISHED", test
    assert user.status(begun["test"])["state"] == "FAILED"
    assert len(user.show(begun["test"])["attempts"]) == 1
    after = user.ask("ckpt", "ls", run)
    assert [(row["step"], row["trust"], row["pinned"]) for row in after] == [
        (row["step"], row["trust"], False) for row in before
    ]
    due = [one for one in user.ask("restore-tests", "due") if one["run"] == run]
    assert "did not finish" in due[0]["why"]


@pytest.mark.proof
def test_the_daemon_tests_a_run_that_goes_on_and_what_it_has_left(lab: SlurmLab, user: User) -> None:
    run = user.submit(
        "tiny-gpt", *SMALL, GENEROUS, *user.slowly(), "train.steps=120", "checkpoint.every=10",
        "restore_tests.every=1m", "restore_tests.layouts=[1,same]",
    )["run"]  # fmt: skip
    found = verdicts(user, run, 2, seconds=300)
    assert {test["verdict"] for test in found} == {"RESTORED"}, found
    assert user.wait(run) == 0
    last = verdicts(user, run, len(history_of(user, run)), seconds=200)
    assert {test["verdict"] for test in last} == {"RESTORED"}, last
    assert {test["layout"] for test in last} == {"1", "same"}


@pytest.mark.proof
@pytest.mark.parametrize("trouble", ["out-of-time", "preempted", "node-dies", "killed"])
def test_troubles_of_the_job_are_no_verdict(lab: SlurmLab, user: User, trouble: str) -> None:
    run = user.submit("tiny-gpt", *SMALL, "train.steps=40")["run"]
    assert user.wait(run) == 0
    (begun,) = user.ask("ckpt", "restore-test", f"{run}@12", "--layout", "1x1", "--steps", "1000")
    test = begun["test"]
    job = user.until(lambda: user.show(test)["attempts"][0]["job_id"], 60, "the test's job")
    user.until(lambda: user.processes("orch-rank-0"), 90, "its rank")
    _make(lab, user, job, trouble)
    (verdict,) = verdicts(user, run, 1, seconds=200)
    assert verdict["verdict"] in ("NOT_FINISHED", "RESTORED"), verdict
    assert trouble == "out-of-time" or verdict["verdict"] == "NOT_FINISHED", verdict


def _make(lab: SlurmLab, user: User, job: str, trouble: str) -> None:
    if trouble == "out-of-time":
        lab.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    elif trouble == "preempted":
        lab.ask("sbatch", "-p", "high", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 4")
    elif trouble == "killed":
        user.processes("orch-rank-0")[0].kill()
    else:
        (node,) = lab.nodes_of(job)
        lab.kill_node(node)
        lab.start_node(node)


@pytest.mark.proof
def test_fifty_healthy_checkpoints_are_restored(
    lab: SlurmLab, user: User, record_property: Callable[[str, object], None]
) -> None:
    run = user.submit("tiny-gpt", *SMALL, "train.steps=40")["run"]
    assert user.wait(run) == 0
    layouts = ("1", "same", "1x2", "2x2", "1x4")
    for number in range(10):
        step = (20, 24, 28, 32, 36)[number % 5]
        words = ["ckpt", "restore-test", f"{run}@{step}", "--layout", ",".join(layouts), "--wait"]
        done = user.ask(*words, timeout=400)
        assert {test["verdict"] for test in done} == {"RESTORED"}, done
    record_property("restore tests on Slurm", 50)


@pytest.mark.proof
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_an_unchanged_program_restores_on_two_nodes_and_keeps_nothing(user: User, launcher: str) -> None:
    script, out = Path(__file__).parents[1] / "programs" / "plain_ddp.py", user.folder / "out"
    words = [
        sys.executable,
        *(["-m", "torch.distributed.run"] if launcher == "torchrun" else []),
        str(script),
        str(out),
    ]
    command = ",".join(f"'{word}'" for word in [*words, "--steps", "40"])
    settings = [f"cluster.{key}" for key in ("nodes=2", "ranks_per_node=1", "cpus_per_task=2", "time=10")]
    run = user.submit("torchrun-script", f"command=[{command}]", *settings, "restore_tests.every=off")["run"]
    assert user.wait(run) == 0
    user.until(lambda: len(user.ask("ckpt", "ls", run)) == 4, 60, "its checkpoints")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    done = user.run("ckpt", "restore-test", f"{run}@20", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "the rank that saved has the parameters of ckpt_20.pt, bit for bit" in said
    assert "the command continued from step 20 and trained" in said
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
