"""Expedited requeue on the newest Slurm: after a node failure, the job keeps its surviving nodes on a busy cluster."""

import os
import signal
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def node_to_repair(lab: SlurmLab) -> Iterator[list[str]]:
    """List to which a test appends the nodes that it has killed; they are started again at its end."""
    killed: list[str] = []
    yield killed
    for node in killed:
        lab.start_node(node)


def in_second_attempt(user: User, run: str) -> bool:
    return any(line["attempt"] == 2 for line in user.steps(run))


def submit_sleep(lab: SlurmLab, *options: str) -> str:
    """Submit a foreign job that takes whole nodes, and return its id."""
    words = ["sbatch", "-p", "low", "--exclusive", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 300"]
    return lab.ask(*words).stdout.strip()


def state_of(lab: SlurmLab, job: str) -> str:
    return lab.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()


def restarts_of(lab: SlurmLab, job: str) -> str:
    return lab.ask("squeue", "-h", "-t", "all", "-j", job, "-O", "RestartCnt:8").stdout.strip()


def history(user: User, run: str) -> list[dict[str, Any]]:
    return list(user.ask("restore-tests", "history", run))


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


def test_a_new_controller_continues_the_job_if_the_first_is_killed(
    lab: SlurmLab, user: User, calm: tuple[User, str], node_to_repair: list[str]
) -> None:
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT, *user.slowly(0.8))
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 5)
    node_to_repair.append(lab.nodes_of(job)[1])
    lab.cut_power(node_to_repair[0])
    user.kill_controller()
    user.until(lambda: restarts_of(lab, job) == "1" and state_of(lab, job) == "RUNNING", 120, "Slurm's requeue")
    assert user.run("controller", "start").returncode == 0
    user.until(lambda: len(user.show(run)["attempts"]) == 2, 90, "a second attempt")
    user.kill_controller()
    user.hurry()
    assert user.run("controller", "start").returncode == 0
    assert user.wait(run) == 0
    first, second = user.show(run)["attempts"]
    assert (first["failure"]["kind"], first["failure"]["node"]) == ("node_lost", node_to_repair[0])
    assert [(one["job_id"], one["restarts"]) for one in (first, second)] == [(job, 0), (job, 1)]
    assert_no_step_twice_at_once(user, run)
    compare(user, run, calm)


def test_a_restore_test_whose_node_dies_leaves_no_job(
    lab: SlurmLab, user: User, node_to_repair: list[str]
) -> None:  # fmt: skip
    run = user.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT)["run"]
    assert user.wait(run) == 0
    (begun,) = user.ask("ckpt", "restore-test", f"{run}@8", "--layout", "2x1", "--steps", "1000")
    test = begun["test"]
    job = user.until(lambda: user.show(test)["attempts"][0]["job_id"], 60, "the test's job")
    user.until(lambda: user.processes("orch-rank-1"), 90, "its ranks")
    node_to_repair.append(lab.nodes_of(job)[1])
    lab.cut_power(node_to_repair[0])
    ended = user.until(lambda: [one for one in history(user, run) if one["verdict"]], 150, "a verdict", every=1.0)
    assert [one["verdict"] for one in ended] == ["NOT_FINISHED"]
    user.until(lambda: state_of(lab, job) in ("", "CANCELLED"), 60, "the end of the requeued job")
    assert len(user.show(test)["attempts"]) == 1
    (passed,) = user.ask("ckpt", "restore-test", f"{run}@8", "--layout", "2x1", "--wait", timeout=200)
    assert passed["verdict"] == "RESTORED"


def test_a_run_with_a_spare_node_survives_the_loss_of_a_node_and_then_of_its_leader(
    lab: SlurmLab, user: User, calm: tuple[User, str], node_to_repair: list[str]
) -> None:
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT, "cluster.spare_nodes=1", *user.slowly(0.8))
    run = submitted["run"]
    training(user, run, 3)
    leader, second, _ = user.show(run)["attempts"][0]["nodes"]
    lab.cut_power(second)
    node_to_repair.append(second)
    user.until(lambda: user.status(run)["generations"] == 2 and user.step(run) > 5, 120, "training on the spare node")
    assert len(user.show(run)["attempts"]) == 1
    lab.start_node(node_to_repair.pop())
    lab.cut_power(leader)
    node_to_repair.append(leader)
    user.until(lambda: in_second_attempt(user, run), 200, "training in a second attempt")
    user.hurry()
    assert user.wait(run) == 0
    first, last = user.show(run)["attempts"]
    assert first["failure"]["kind"] == "node_lost"
    assert leader not in last["nodes"]
    assert_no_step_twice_at_once(user, run)
    compare(user, run, calm)


def test_an_elastic_run_trains_on_fewer_nodes_if_no_replacement_comes(
    lab: SlurmLab, user: User, node_to_repair: list[str]
) -> None:
    elastic = ["cluster.nodes=4", "cluster.min_nodes=2", "parallel.dp_shard=0", "recovery.patience=6"]
    sized = ["train.batch_size=12", "train.steps=24"]
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *elastic, *sized, *user.slowly(0.8))
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 3)
    node_to_repair.append(lab.nodes_of(job)[-1])
    lab.cut_power(node_to_repair[0])
    user.until(lambda: any(line["attempt"] > 1 for line in user.steps(run)), 240, "training on three nodes")
    user.hurry()
    assert user.wait(run) == 0
    first, *waited, last = user.show(run)["attempts"]
    assert (first["failure"]["kind"], first["job_id"], len(first["nodes"])) == ("node_lost", job, 4)
    assert [(one["failure"]["kind"], one["job_id"]) for one in waited] == [("nodes_missing", job)]
    assert (last["job_id"] != job, len(last["nodes"])) == (True, 3)
    assert_no_step_twice_at_once(user, run)
    assert state_of(lab, job) in ("", "CANCELLED")
