"""Spare nodes on the real Slurm: a node dies, and the same job continues with another."""

import time

import pytest

from tests.end_to_end.user import User, assert_no_step_twice_at_once
from tests.slurm.lab import SlurmLab
from trainer.protocol.events import Event, EventKind, read_events

pytestmark = [pytest.mark.slurm, pytest.mark.multi, pytest.mark.timeout(400)]
SMALL = [
    "cluster.nodes=2", "cluster.spare_nodes=1", "cluster.ranks_per_node=1", "cluster.cpus_per_task=2",
    "parallel.tp=1", "cluster.partition=low", "cluster.time=10", "recovery.backoff=0.5", "train.steps=50",
    "checkpoint.every=8",
]  # fmt: skip


def events(user: User, run: str, kind: EventKind) -> list[Event]:
    found = [
        event
        for attempt in user.run_dir(run).all_attempts()
        for path in attempt.events.glob("*.jsonl")
        for event in read_events(path)[0]
    ]
    return sorted((event for event in found if event.kind == kind), key=lambda event: event.time)


def training(user: User, run: str, beyond: int, seconds: float = 90) -> None:
    user.until(lambda: user.step(run) > beyond, seconds, f"training beyond step {beyond}")


@pytest.mark.proof
def test_a_dead_node_is_replaced_within_the_job(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *SMALL)
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 18)
    dead = lab.nodes_of(job)[1]
    killed = time.time()
    lab.cut_power(dead)
    try:
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    (attempt,) = user.show(run)["attempts"]
    assert (attempt["job_id"], attempt["generations"], attempt["last_step"]) == (job, 2, 50)
    (used,) = events(user, run, EventKind.SPARE_USED)
    assert used.data["instead"] == dead
    first = events(user, run, EventKind.GENERATION_FIRST_STEP)[1]
    assert first.time - killed < 60
    assert_no_step_twice_at_once(user, run)


@pytest.mark.proof
def test_power_loss_of_the_leading_node_leads_to_a_new_job(lab: SlurmLab, user: User) -> None:
    submitted = user.submit("tiny-gpt", *SMALL)
    run, job = submitted["run"], submitted["job_id"]
    training(user, run, 18)
    dead = lab.nodes_of(job)[0]
    lab.cut_power(dead)
    try:
        assert user.wait(run) == 0
    finally:
        lab.start_node(dead)
    first, second = user.show(run)["attempts"]
    assert (first["job_id"], first["failure"]["kind"], first["failure"]["node"]) == (job, "node_lost", dead)
    assert dead not in second["nodes"]
    assert not events(user, run, EventKind.SPARE_USED)
    assert_no_step_twice_at_once(user, run)
