"""Expedited requeue on the newest Slurm: after a node failure, the job keeps its surviving nodes on a busy cluster."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.end_to_end.user import User, assert_no_step_twice_at_once, compare
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.slurm.small_runs import ONE_RANK_EACH, SHORT, training
from tests.slurm.suites import NEWEST

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with temporary_lab(NEWEST, extra="SlurmctldParameters=enable_expedited_requeue\n") as made:
        yield made


def submit_sleep(lab: SlurmLab, *options: str) -> str:
    """Submit a foreign job that takes whole nodes, and return its id."""
    words = ["sbatch", "-p", "low", "--exclusive", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 300"]
    return lab.ask(*words).stdout.strip()


def state_of(lab: SlurmLab, job: str) -> str:
    return lab.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()


def test_the_run_continues_in_its_job_before_others_get_its_nodes(
    lab: SlurmLab, user: User, calm: tuple[User, str]
) -> None:
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT, *user.slowly(0.8))
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 5)
    kept, dead = lab.nodes_of(job)
    busy, free = sorted(set(lab.nodes) - {kept, dead})
    submit_sleep(lab, "-N", "1", "-w", busy)
    greedy = submit_sleep(lab, "-N", "2")  # it would take the free node and the surviving one
    lab.kill_node(dead)
    try:
        user.until(lambda: any(line["attempt"] == 2 for line in user.steps(run)), 150, "training in a second attempt")
        assert state_of(lab, greedy) == "PENDING"
        user.hurry()
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    first, second = user.show(run)["attempts"]
    assert (first["failure"]["kind"], first["failure"]["node"]) == ("node_lost", dead)
    assert first["job_id"] == second["job_id"] == job
    assert (first["restarts"], second["restarts"]) == (0, 1)
    assert first["sluid"] not in ("", second["sluid"])
    assert set(second["nodes"]) == {kept, free}
    assert_no_step_twice_at_once(user, run)
    compare(user, run, calm)


def test_a_job_that_fails_is_not_left_held(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT, "recovery.restarts_in_place=0", *user.slowly(0.8))
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 5)
    os.kill(user.processes("orch-rank-1")[0].pid, signal.SIGKILL)
    user.until(lambda: any(line["attempt"] == 2 for line in user.steps(run)), 150, "training in a second attempt")
    user.hurry()
    assert user.wait(run) == 0
    first, second = user.show(run)["attempts"]
    assert first["failure"]["kind"] == "rank_killed"
    assert (second["job_id"] != job, second["restarts"]) == (True, 0)
    user.until(lambda: state_of(lab, job) in ("", "CANCELLED"), 30, "the end of the held job")
