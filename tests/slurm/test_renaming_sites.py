"""Sites that change jobs by a job_submit plugin or an sbatch wrapper, and foreign jobs with unusual rows."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User, assert_no_step_twice_at_once
from tests.slurm.lab import SlurmLab, temporary_lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
SMALL = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.cpus_per_task=2", "cluster.time=10",
    "parallel.tp=1", "recovery.backoff=0.5", "checkpoint.every=8",
]  # fmt: skip
WRAPPER = """#!/bin/sh
for script; do :; done
copy=$(mktemp {folder}/XXXXXX)
cp "$script" "$copy"
exec {sbatch} --job-name=site-$$ --comment='managed by the site' --output=/dev/null --error=/dev/null "$copy"
"""


def add_foreign_jobs(lab: SlurmLab) -> list[str]:
    """Submit unrelated jobs: a long comment, our separator, an unusual host list, bytes that are not text."""
    asked: list[list[str | bytes]] = [
        ["--hold", "--comment", "x" * 800],
        ["--hold", "--comment", "a\x1fb", "-J", "two\nlines"],
        ["-w", f"{lab.nodes[0]},{lab.nodes[2]},{lab.nodes[3]}", "-N", "3"],
        ["--hold", "--array", "1-3%2"],
        ["--hold", "-J", b"\xff\xfe"],
    ]
    ids = []
    for options in asked:
        script: list[str | bytes] = ["-p", "low", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300"]
        done = lab.ask("sbatch", *options, *script)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        ids.append(done.stdout.strip())
    return ids


def live_jobs(lab: SlurmLab, foreign: list[str]) -> set[str]:
    """Return jobs that may run, without the foreign ones."""
    listed = lab.ask("squeue", "-h", "--me", "-t", "PENDING,RUNNING,COMPLETING", "-o", "%A").stdout.split()
    return set(listed) - set(foreign)


def follow(user: User, lab: SlurmLab, run: str, foreign: list[str]) -> None:
    """Watch the run until it ends; it must never have more than one live job."""

    def ended() -> bool:
        live = live_jobs(lab, foreign)
        assert len(live) <= 1, live
        status = user.status(run)
        assert status["reason"]
        return status["state"] in ("SUCCEEDED", "HELD", "FAILED")

    user.until(ended, 240, "the end of the run", every=1.0)
    assert user.status(run)["state"] == "SUCCEEDED", user.status(run)["reason"]


def reasons(user: User, run: str) -> str:
    return user.run("show", run, "--json").stdout


@pytest.mark.proof
def test_a_plugin_that_renames_jobs_and_odd_foreign_ones_disturb_nothing(lab: SlurmLab, user: User) -> None:
    foreign = add_foreign_jobs(lab)
    submitted = user.submit("tiny-gpt", *SMALL, "cluster.partition=high", "train.steps=16")
    run, job = submitted["run"], submitted["job_id"]
    assert lab.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%j").stdout.strip() == "site-job"
    submitted_because = reasons(user, run)  # `status` has the newest reason only, and the job may run by now
    assert "Slurm renamed the job: orch-" in submitted_because
    assert "-> site-job" in submitted_because
    follow(user, lab, run, foreign)
    assert [attempt["job_id"] for attempt in user.show(run)["attempts"]] == [job]
    assert_no_step_twice_at_once(user, run)


@pytest.fixture
def odd_lab(suite: str) -> Iterator[SlurmLab]:
    def rename(lab: SlurmLab) -> None:
        lab.nodes = ["gpu-01-3", "gpu-01-4", "gpu-02-3", "gpu-02-4"]

    with temporary_lab(suite, rename) as made:
        yield made


@pytest.mark.proof
@pytest.mark.parametrize("point", ["", "after_sbatch", "after_submit", "after_adopt"])
def test_a_wrapper_that_changes_all_but_the_id(odd_lab: SlurmLab, tmp_path: Path, point: str) -> None:
    lab, programs = odd_lab, tmp_path / "bin"
    programs.mkdir()
    environment = lab.environment()
    real = shutil.which("sbatch", path=environment["PATH"])
    (programs / "sbatch").write_text(WRAPPER.format(folder=tmp_path, sbatch=real))
    (programs / "sbatch").chmod(0o755)
    user = User(tmp_path, "slurm", {**environment, "PATH": f"{programs}{os.pathsep}{environment['PATH']}"})
    try:
        foreign = add_foreign_jobs(lab)
        settings = [
            *SMALL,
            "cluster.partition=low",
            "train.steps=60",
            f"cluster.root={user.root}",
            "cluster.kind=slurm",
        ]
        if point:
            died = user.run("submit", "tiny-gpt", *settings, "--no-controller", ORCH_FAILPOINT=point)
            assert died.returncode == -signal.SIGKILL, died.stderr
        else:
            user.submit("tiny-gpt", *settings)
        (run,) = [row["run"] for row in user.ask("status", "--all")]
        waiting = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", "wait", run, "--timeout", "300"],
            env=user.environment, cwd=tmp_path, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        user.until(lambda: user.step(run) > 10, 120, "training")
        urgent = lab.ask(
            "sbatch", "-p", "high", "-N", "4", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 4"
        )
        follow(user, lab, run, [*foreign, urgent.stdout.strip()])
        assert_no_step_twice_at_once(user, run)
        assert waiting.wait(timeout=60) == 0
    finally:
        user.leave()
