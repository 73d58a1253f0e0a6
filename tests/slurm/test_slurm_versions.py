"""Events of a run's life on every Slurm version, each with the right state, the right reason and one job per attempt.

docs/slurm-versions.md shows the results of `make proof`; `make test` runs those that are not marked `proof`, and the
scheduler's contract, on the newest Slurm.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.controller.running_jobs import SAVED_WITHIN
from tests.end_to_end.user import User, assert_no_step_twice_at_once, compare
from tests.orchestrator.scheduler.contract import SchedulerContract
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.slurm.small_runs import ONE_RANK_EACH, SHORT, training
from tests.slurm.suites import NEWEST
from tests.slurm.warm_fork_servers import warm_python

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
TRAINS = [*ONE_RANK_EACH, *SHORT]
SHAPE = [
    "cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.partition=low",
    "cluster.time=10", "recovery.backoff=0.2", "recovery.backoff_max=0.5",
]  # fmt: skip
SLEEPS = ["command=[sleep, '600']", *SHAPE]


@pytest.fixture(scope="module")
def suite() -> str:
    """Suite of the sample; ORCH_TEST_SLURM replaces it."""
    return NEWEST


@pytest.fixture(scope="module")
def lab(suite: str) -> Iterator[SlurmLab]:
    """A site that refuses unknown accounts and QOS."""
    with temporary_lab(suite, extra="AccountingStorageEnforce=associations,limits,qos\n") as made:
        for words in (("add", "account", "lab"), ("add", "user", "root", "account=lab")):
            made.ask("sacctmgr", "-i", *words)
        made.wait(lambda: made.ask("sbatch", "--test-only", "--wrap", "true").returncode == 0, "the user's account")
        yield made


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Recorder of each event's result for the page."""

    lab: SlurmLab
    user: User
    record: Callable[[str, object], None]

    def note(self, words: str) -> None:
        self.record(f"Slurm {self.lab.version}", words)

    def run(self, run: str, state: str, reason: str, *kinds: str | None) -> None:
        """Check and record a run's state, its reason, the ends of its attempts, and one job for each attempt."""
        status, attempts = self.user.status(run), self.user.show(run)["attempts"]
        assert status["state"] == state, status
        assert reason in status["reason"]
        ends = [(attempt["failure"] or {}).get("kind") for attempt in attempts]
        assert ends == list(kinds), ends
        jobs = [attempt["job_id"] for attempt in attempts]
        self.user.until(lambda: self._jobs(run) == set(jobs), 60, "one job for each attempt in the accounting")
        named = ", ".join(kind for kind in kinds if kind)
        self.note(f"{state}{f' after {named}' if named else ''}; jobs: {len(set(jobs))}")

    def _jobs(self, run: str) -> set[str]:
        listed = self.lab.ask("sacct", "-X", "-n", "-P", "-S", "now-1hours", "-o", "JobIDRaw,JobName").stdout.split()
        pairs = (line.partition("|") for line in listed)
        return {job for job, _, name in pairs if re.fullmatch(rf"orch-{run}-\d+-[0-9a-f]{{8}}", name)}


@pytest.fixture
def verdict(lab: SlurmLab, user: User, record_property: Callable[[str, object], None]) -> Verdicts:
    return Verdicts(lab=lab, user=user, record=record_property)


class TestContract(SchedulerContract):
    """The contract of schedulers."""


def train(user: User, *settings: str) -> dict[str, Any]:
    return user.submit("tiny-gpt", *TRAINS, *settings, warm_python(user), _name())


def run_a_command(user: User, *settings: str) -> dict[str, Any]:
    return user.submit("torchrun-script", *settings, _name())


def _name() -> str:
    """Return an override with a name that no other run of the lab has."""
    return f"name=run-{secrets.token_hex(3)}"


def running(user: User, run: str, seconds: float = 90) -> dict[str, Any]:
    """Wait until the run is RUNNING; return its status."""

    def runs() -> dict[str, Any]:
        row = user.status(run)
        return row if row["state"] == "RUNNING" else {}

    return dict(user.until(runs, seconds, "a running run"))


def test_submit_and_logs(user: User, verdict: Verdicts) -> None:
    run = train(user)["run"]
    assert user.wait(run) == 0
    assert "step 16" in user.run("logs", run, "--rank", "0").stdout
    verdict.run(run, "SUCCEEDED", "all ranks finished", None)


def test_rank_killed(user: User, calm: tuple[User, str], verdict: Verdicts) -> None:
    run = train(user, *user.slowly())["run"]
    training(user, run, 5)
    user.processes("orch-rank-1")[0].kill()
    user.hurry()
    assert user.wait(run) == 0
    assert user.show(run)["attempts"][0]["generations"] == 2
    compare(user, run, calm)
    verdict.run(run, "SUCCEEDED", "all ranks finished", None)


def test_node_death(lab: SlurmLab, user: User, calm: tuple[User, str], verdict: Verdicts) -> None:
    submitted = train(user, *user.slowly())
    run = submitted["run"]
    training(user, run, 5)
    dead = lab.nodes_of(submitted["job_id"])[-1]
    lab.kill_node(dead)
    user.hurry()
    try:
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    assert user.show(run)["attempts"][0]["failure"]["node"] == dead
    assert_no_step_twice_at_once(user, run)
    compare(user, run, calm)
    verdict.run(run, "SUCCEEDED", "all ranks finished", "node_lost", None)


@pytest.mark.proof
def test_preemption(lab: SlurmLab, user: User, calm: tuple[User, str], verdict: Verdicts) -> None:
    run = train(user, *user.slowly(), "recovery.max_failures=1")["run"]
    training(user, run, 5)
    urgent = lab.ask("sbatch", "-p", "high", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 4")
    assert urgent.returncode == 0, urgent.stderr
    user.until(lambda: len(user.run_dir(run).all_attempts()) > 1, 120, "a second attempt")
    user.hurry()
    assert user.wait(run) == 0
    assert_no_step_twice_at_once(user, run)
    compare(user, run, calm)
    verdict.run(run, "SUCCEEDED", "all ranks finished", "preempted", None)


@pytest.mark.proof
def test_time_limit(user: User, verdict: Verdicts) -> None:
    limit = ["cluster.time=2", "cluster.signal_lead=20", "train.steps=150", "checkpoint.every=0"]
    run = train(user, *user.slowly(), *limit)["run"]
    user.until(lambda: len(user.run_dir(run).all_attempts()) > 1, 200, "a second attempt", every=1.0)
    user.hurry()
    assert user.wait(run) == 0
    first, second, *others = user.show(run)["attempts"]
    assert first["last_step"] == second["resumed_from"]
    # On a busy machine, the limit may also end the second attempt.
    verdict.run(run, "SUCCEEDED", "all ranks finished", *["time_limit"] * (1 + len(others)), None)


def test_scancel_by_another(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    run = run_a_command(user, *SLEEPS)["run"]
    lab.ask("scancel", running(user, run)["job_id"])
    user.until(lambda: user.status(run)["state"] == "HELD", 90, "the run to be held")
    verdict.run(run, "HELD", "cancel", "cancelled")


@pytest.mark.proof
def test_requeue_by_another(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    run = run_a_command(user, *SLEEPS)["run"]
    job = running(user, run)["job_id"]
    user.until(lambda: user.status(run)["generations"] == 1, 90, "the start of the ranks")
    lab.ask("scontrol", "update", f"jobid={job}", "requeue=1")
    assert lab.ask("scontrol", "requeue", job).returncode == 0
    user.until(lambda: user.status(run)["attempts"] == 2, 200, "a second attempt", every=1.0)
    running(user, run)
    assert user.run("cancel", run).returncode == 0
    user.until(lambda: user.status(run)["state"] == "CANCELLED", 90, "the end of the cancelled run")
    ended = user.show(run)["attempts"][0]["failure"]["kind"]
    assert ended == "node_lost" or (ended == "preempted" and lab.version >= "26"), "since 26.05, ranks get TERM first"
    verdict.run(run, "CANCELLED", "orch cancel", ended, "cancelled")


@pytest.mark.proof
def test_hold_by_another(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    full = lab.ask("sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    other = full.stdout.strip()
    user.until(lambda: lab.ask("squeue", "-h", "-j", other, "-o", "%T").stdout.strip() == "RUNNING", 30, "a full lab")
    submitted = train(user)
    run, job = submitted["run"], submitted["job_id"]
    user.until(lambda: user.status(run)["state"] == "QUEUED", 60, "a waiting run")
    time.sleep(SAVED_WITHIN + 10)  # before that, orch takes a hold for a release that Slurm has lost
    lab.ask("scontrol", "hold", job)
    lab.ask("scancel", other)
    user.until(lambda: "a user holds it" in user.status(run)["reason"], 400, "the hold as the reason")
    lab.ask("scontrol", "release", job)
    assert user.wait(run) == 0
    verdict.run(run, "SUCCEEDED", "all ranks finished", None)


@pytest.mark.proof
def test_all_nodes_drained(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    lab.ask("scontrol", "update", "nodename=n[1-4]", "state=drain", "reason=fan")
    try:
        run = train(user)["run"]
        user.until(lambda: "nodes that it needs are down" in user.status(run)["reason"], 90, "why it waits")
    finally:
        lab.ask("scontrol", "update", "nodename=n[1-4]", "state=resume")
    assert user.wait(run) == 0
    verdict.run(run, "SUCCEEDED", "all ranks finished", None)


REFUSED = {
    "account": "Invalid account or account/partition combination specified",
    "partition": "Invalid partition name specified",
    "qos": "Invalid qos specification",
}
"""Slurm's messages by config key of `cluster`."""


@pytest.mark.proof
@pytest.mark.parametrize("key", list(REFUSED))
def test_unknown_account_partition_or_qos(lab: SlurmLab, user: User, verdict: Verdicts, key: str) -> None:
    words = [f"cluster.root={user.root}", "--cluster", "slurm", *SLEEPS, f"cluster.{key}=nonesuch"]
    done = user.run("submit", "torchrun-script", *words)
    assert done.returncode == 4, done.stderr
    assert REFUSED[key] in done.stderr
    assert f"cluster.{key}" in done.stderr
    assert user.ask("status", "--all") == []
    assert not lab.ask("squeue", "-h", "--me").stdout.strip()
    verdict.note(f"refused: {REFUSED[key]}; jobs: 0")


@pytest.mark.proof
def test_slurmctld_killed_and_started_again(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    run = train(user, *user.slowly(), "train.steps=40")["run"]
    training(user, run, 5)
    time.sleep(6)  # slurmctld saves its state at most every 5 s: before that a kill loses the job for good
    lab.kill_controller()
    try:
        user.until(lambda: "does not answer" in user.status(run)["reason"], 90, "the outage as the reason")
        assert user.status(run)["state"] == "RUNNING"
    finally:
        lab.start_controller()
    user.hurry()
    assert user.wait(run) == 0
    verdict.run(run, "SUCCEEDED", "all ranks finished", None)


@pytest.mark.proof
def test_restore_test(user: User, verdict: Verdicts) -> None:
    run = train(user)["run"]
    assert user.wait(run) == 0
    (test,) = user.ask("ckpt", "restore-test", f"{run}@8", "--layout", "1", "--wait", timeout=300)
    assert test["verdict"] == "RESTORED", test
    verdict.run(test["test"], "SUCCEEDED", "all ranks finished", None)


@pytest.mark.proof
def test_fewer_nodes(lab: SlurmLab, user: User, verdict: Verdicts) -> None:
    elastic = ["cluster.min_nodes=1", "recovery.patience=6", "train.dtype=float32"]
    lab.ask("scontrol", "update", "nodename=n[3-4]", "state=drain", "reason=away")
    submitted = train(user, *user.slowly(), *elastic)
    run = submitted["run"]
    training(user, run, 5)
    gone = lab.nodes_of(submitted["job_id"])[-1]
    lab.kill_node(gone)
    lab.ask("scontrol", "update", f"nodename={gone}", "state=down", "reason=lost")
    user.hurry()
    try:
        assert user.wait(run) == 0
    finally:
        lab.start_node(gone)
        lab.ask("scontrol", "update", "nodename=n[3-4]", "state=resume")
    assert [len(attempt["nodes"]) for attempt in user.show(run)["attempts"]] == [2, 0, 1]
    assert_no_step_twice_at_once(user, run)
    verdict.run(run, "SUCCEEDED", "all ranks finished", "node_lost", "nodes_missing", None)


def test_command_that_exits_with_3(user: User, verdict: Verdicts) -> None:
    run = run_a_command(user, *SHAPE, "command=[sh, -c, 'exit 3']")["run"]
    assert user.wait(run) == 8
    verdict.run(run, "FAILED", "exit code 3", "user_error")


@pytest.mark.proof
def test_batch_script_that_exits_with_3(user: User, verdict: Verdicts) -> None:
    python = user.folder / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    run = run_a_command(user, *SLEEPS, f"cluster.python={python}", "recovery.max_failures=3")["run"]
    assert user.wait(run) == 8
    assert [attempt["failure"]["exit_code"] for attempt in user.show(run)["attempts"]] == [3, 3, 3]
    verdict.run(run, "FAILED", "launch failed 3 times", *["launch_failed"] * 3)
