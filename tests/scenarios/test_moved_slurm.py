"""A Slurm whose head node, port or state has moved: another name, the same jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.states import AttemptState, RunState
from tests.fakes.model_slurm import MIN_JOB_AGE
from tests.scenarios.clusters import A, B, Clusters

MOVED, RENAMED = "lab@login2:6817/cccccccc", "campus@login2:6817/cccccccc"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Clusters]:
    made = Clusters(tmp_path)
    yield made
    made.close()


def move(two: Clusters, name: str) -> None:
    """The Slurm of A answers by another name from now on."""
    two.a.slurms[name] = two.a.slurm
    two.a.reaches = name


def follow(two: Clusters, turns: int, seconds: float = 5.0) -> None:
    for _ in range(turns):
        for site in two.sites:
            site.tick()
        two.a.slurm.step(seconds)
        two.clock.advance(-seconds)
        two.b.slurm.step(seconds)


def test_the_controller_of_a_slurm_that_has_moved_takes_its_live_runs_over_by_their_jobs(two: Clusters) -> None:
    name, theirs = two.submit(A, steps=60), two.submit(B, steps=60)
    two.turns(6)
    job = two.a.slurm.running()[0]
    move(two, MOVED)
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    follow(two, 12)
    assert two.run(name).scheduler == MOVED
    assert two.run(theirs).scheduler == B
    follow(two, 60)
    assert (two.run(name).state, two.run(theirs).state) == (RunState.CANCELLED, RunState.SUCCEEDED)
    assert [attempt.job_id for attempt in two.store.attempts(name)] == [job.job_id]
    assert not two.store.user_requests()


def test_a_run_whose_job_ends_after_the_move_goes_on(two: Clusters) -> None:
    name = two.submit(A, steps=400)
    two.turns(6)
    move(two, MOVED)
    two.a.slurm.preempt(two.a.slurm.running()[0])
    follow(two, 400)
    assert two.run(name).state is RunState.SUCCEEDED
    assert len(two.store.attempts(name)) == 2


def test_a_run_whose_job_only_accounting_remembers_goes_on_after_the_move(two: Clusters) -> None:
    name = two.submit(A, steps=400)
    two.turns(6)
    two.a.slurm.preempt(two.a.slurm.running()[0])
    two.a.slurm.step(30.0)
    two.a.slurm.step(MIN_JOB_AGE + 30.0)
    move(two, MOVED)
    follow(two, 400)
    assert (two.run(name).scheduler, two.run(name).state) == (MOVED, RunState.SUCCEEDED)
    assert len(two.store.attempts(name)) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_is_taken_over_without_a_job_of_the_run(two: Clusters, lost: bool) -> None:
    """Another ClusterName, or a Slurm that has lost its jobs with its name: nobody can tell that it was this one."""
    name = two.submit(A, steps=4000)
    two.turns(6)
    if lost:
        two.a.slurm.forget(two.a.slurm.running()[0])
    move(two, MOVED if lost else RENAMED)
    follow(two, 100)
    assert two.run(name).scheduler == A
    assert [attempt.state for attempt in two.store.attempts(name)] == [AttemptState.RUNNING]


def test_another_run_of_this_name_is_no_evidence(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(6)
    (attempt,) = two.store.attempts(name)
    key = next(key for key, row in two.store._attempts.items() if row.run == name)
    two.store._attempts[key] = type(attempt)(**{**attempt.__dict__, "nonce": "0badbeef"})
    move(two, MOVED)
    follow(two, 30)
    assert two.run(name).scheduler == A


def test_a_run_that_was_never_submitted_goes_on_where_a_person_says(two: Clusters) -> None:
    name = two.submit(A, steps=60)
    move(two, RENAMED)
    follow(two, 10)
    assert two.run(name).scheduler == A
    two.store.add_user_request(name, "resume", {"here": RENAMED}, two.clock.now)
    follow(two, 60)
    assert (two.run(name).scheduler, two.run(name).state) == (RENAMED, RunState.SUCCEEDED)
    assert not two.store.user_requests()
