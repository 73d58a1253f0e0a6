"""Runs on the real Slurm finish although ranks, nodes, controllers and agents are killed."""

import os
import signal
from typing import Any

import psutil
import pytest

from tests.end_to_end.user import User, assert_exact, assert_gone, assert_no_step_twice_at_once, compare
from tests.slurm import processes
from tests.slurm.lab import SlurmLab
from tests.slurm.small_runs import ONE_RANK_EACH, SHORT, SMALL, training
from tests.slurm.warm_fork_servers import warm_python

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
ONE_NODE = [*SMALL, "cluster.nodes=1", "parallel.tp=1"]


def job_names(lab: SlurmLab) -> list[str]:
    return lab.ask("squeue", "-h", "--me", "-t", "PENDING,RUNNING", "-o", "%j").stdout.split()


@pytest.mark.proof
def test_a_killed_rank_restarts_in_place_bit_for_bit(lab: SlurmLab, user: User) -> None:
    calm = user.submit("tiny-gpt", *SMALL)["run"]
    assert user.wait(calm) == 0
    run = user.submit("tiny-gpt", *SMALL)["run"]
    training(user, run, 18)
    victim = user.processes("orch-rank-1")[0]
    victim.send_signal(signal.SIGKILL)
    assert user.wait(run) == 0

    (attempt,) = user.show(run)["attempts"]
    assert attempt["generations"] == 2
    assert user.status(run)["state"] == "SUCCEEDED"
    assert_exact(user, run, calm)


def test_preemption_and_then_a_dead_node(lab: SlurmLab, user: User, calm: tuple[User, str]) -> None:
    settings = [*ONE_RANK_EACH, *SHORT, "recovery.max_failures=1"]
    run = user.submit("tiny-gpt", *settings, *user.slowly(0.8), warm_python(user))["run"]
    training(user, run, 5)
    urgent = lab.ask(
        "sbatch", "-p", "high", "-N", "4", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 4"
    )
    assert urgent.returncode == 0, urgent.stderr
    user.until(lambda: any(line["attempt"] == 2 for line in user.steps(run)), 120, "training in a second attempt")
    dead = lab.nodes_of(user.status(run)["job_id"])[-1]
    lab.kill_node(dead)
    user.hurry()
    try:
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    preempted, *_ = user.show(run)["attempts"]
    assert preempted["failure"] is None or preempted["failure"]["kind"] == "preempted"
    assert_moved_away(user, run, dead)
    compare(user, run, calm)


@pytest.mark.proof
def test_a_node_with_ranks_but_no_daemons_is_left(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *SMALL, "train.steps=4000")
    run = submitted["run"]
    training(user, run, 10)
    dead = lab.nodes_of(submitted["job_id"])[-1]
    lab.kill_node(dead, ranks_too=False)
    try:
        user.until(lambda: {line["attempt"] for line in user.steps(run)} == {1, 2}, 120, "training elsewhere")
    finally:
        lab.start_node(dead)
    assert_moved_away(user, run, dead)
    listed = lab.ask("sacct", "-X", "-D", "-n", "-P", "-j", submitted["job_id"], "-o", "State,JobName").stdout
    assert "NODE_FAIL" in listed


def assert_moved_away(user: User, run: str, dead: str) -> None:
    """Check that the second-to-last attempt lost its node, the last trained elsewhere, and they never overlapped."""
    lost, last = user.show(run)["attempts"][-2:]
    assert lost["failure"]["kind"] == "node_lost"
    assert lost["failure"]["node"] == dead
    assert dead not in last["nodes"]
    assert dead in last["excluded"]
    assert_no_step_twice_at_once(user, run)


@pytest.mark.proof
def test_usr2_is_an_agreed_stop_with_a_save(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *ONE_RANK_EACH, *user.slowly(), "checkpoint.every=0")
    run = submitted["run"]
    training(user, run, 10)
    lab.ask("scancel", "--signal=USR2", submitted["job_id"])
    user.until(lambda: len(user.run_dir(run).all_attempts()) > 1, 120, "a second attempt")
    user.hurry()
    assert user.wait(run) == 0
    first, second = user.show(run)["attempts"]
    assert first["last_step"] == second["resumed_from"]
    assert second["resumed_from"] >= 10
    exits = user.run("logs", run, "--attempt", "1", "--rank", "all").stdout
    assert "Traceback" not in exits
    assert_no_step_twice_at_once(user, run)


@pytest.mark.proof
def test_a_moved_time_limit_is_met_with_a_save_and_a_new_attempt(lab: SlurmLab, user: User) -> None:
    lead = ["cluster.time=0:30:00", "cluster.signal_lead=20", "recovery.max_failures=1"]
    submitted = user.submit("tiny-gpt", *SMALL, *lead, *user.slowly(), "train.steps=4000", "checkpoint.every=0")
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 2)
    elapsed = lab.ask("squeue", "-h", "-j", job, "-o", "%M").stdout.strip()
    seconds = sum(int(part) * 60**place for place, part in enumerate(reversed(elapsed.split(":"))))
    # Slurm's signal may be a minute early: by then the job must know its new end.
    assert lab.ask("scontrol", "update", f"jobid={job}", f"timelimit={seconds // 60 + 3}").returncode == 0
    user.until(lambda: {line["attempt"] for line in user.steps(run)} == {1, 2}, 350, "training in a second attempt")
    # Ranks write their steps faster than the controller reads events.
    user.until(lambda: user.show(run)["attempts"][1]["resumed_from"], 30, "where the second attempt went on", every=1.0)
    first, second = user.show(run)["attempts"]
    assert (first["failure"]["kind"], first["generations"]) == ("time_limit", 1)
    assert second["resumed_from"] == first["last_step"]
    assert_no_step_twice_at_once(user, run)


@pytest.mark.proof
def test_every_way_to_be_stopped_has_its_own_label(lab: SlurmLab, user: User) -> None:
    alone = [*ONE_NODE, "cluster.ranks_per_node=1", "parallel.dp_shard=1", "train.steps=4000", "checkpoint.every=0"]
    slowly = user.slowly()
    jobs = {name: user.submit("tiny-gpt", *alone, *slowly, f"name={name}") for name in ("kill", "limit", "grace")}
    for submitted in jobs.values():
        training(user, submitted["run"], 5)

    def first(name: str) -> dict[str, Any]:
        return dict(user.show(jobs[name]["run"])["attempts"][0])

    def end(name: str) -> dict[str, Any]:
        return dict(user.until(lambda: first(name)["failure"], 120, f"the end of {name}", every=1.0))

    lab.ask("scancel", jobs["kill"]["job_id"])
    killed = end("kill")
    assert killed["kind"] == "cancelled", killed
    # Nobody tells this job that its limit is another one.
    assert user.run("controller", "stop").returncode == 0
    assert lab.ask("scontrol", "update", f"jobid={jobs['limit']['job_id']}", "timelimit=4").returncode == 0
    outcome = user.run_dir(jobs["limit"]["run"]).attempt(1).outcome
    user.until(outcome.exists, 200, "Slurm's signal before the shortened limit", every=1.0)
    assert user.run("controller", "start").returncode == 0
    failure = end("limit")
    assert failure["kind"] == "time_limit", failure
    assert "an agent got SIGUSR2; the job was near its time limit" in failure["reason"]
    # Within the grace time the job ends by itself: Slurm calls that FAILED.
    lab.ask("scontrol", "update", "partition=low", "gracetime=30", "preemptmode=cancel")
    try:
        node = lab.nodes_of(jobs["grace"]["job_id"])[0]
        lab.ask("sbatch", "-p", "high", "-w", node, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 4")
        assert end("grace")["kind"] == "preempted"
    finally:
        lab.ask("scontrol", "update", "partition=low", "gracetime=0", "preemptmode=requeue")
    assert first("grace")["generation_list"][0]["reason"] == "all ranks stopped: an agent got SIGTERM"


@pytest.mark.proof
def test_a_killed_agent_leaves_no_process_and_the_run_recovers(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *SMALL)
    run = submitted["run"]
    training(user, run, 10)
    node = lab.nodes_of(submitted["job_id"])[-1]
    mine = [process for process in map(psutil.Process, processes.job_processes(lab.conf, node))]
    agent = next(process for process in mine if process.cmdline()[:1] and process.cmdline()[0].startswith("orch-agent"))
    family = agent.children(recursive=True)
    assert family
    os.kill(agent.pid, signal.SIGKILL)
    assert_gone(family)
    assert user.wait(run) == 0
    assert_no_step_twice_at_once(user, run)


@pytest.mark.proof
@pytest.mark.parametrize("point", ["after_submit", "after_submitted", "after_go"])
def test_a_controller_killed_in_the_middle_of_a_launch(lab: SlurmLab, user: User, point: str) -> None:
    submitted = user.run(
        "submit", "tiny-gpt", *SMALL, "train.steps=8", f"cluster.root={user.root}", "cluster.kind=slurm",
        "--no-controller", ORCH_FAILPOINT=point,
    )  # fmt: skip
    assert submitted.returncode == -signal.SIGKILL, submitted.stderr
    run = user.ask("status", "--all")[0]["run"]
    assert user.run("controller", "tick").returncode == 0
    assert len([name for name in job_names(lab) if name.startswith(f"orch-{run}-")]) <= 1
    assert user.wait(run) == 0
    assert {line["attempt"] for line in user.work(run)} == {1}


@pytest.mark.proof
def test_a_killed_controller_while_a_node_dies(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *SMALL)
    run = submitted["run"]
    training(user, run, 10)
    assert user.kill_controller() >= 1
    dead = lab.nodes_of(submitted["job_id"])[-1]
    lab.kill_node(dead)
    try:
        assert user.run("controller", "tick").returncode == 0
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    assert_no_step_twice_at_once(user, run)
    assert len(user.show(run)["attempts"]) == 2
