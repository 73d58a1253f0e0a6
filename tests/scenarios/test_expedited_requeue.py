"""Stories of a node failure after which Slurm keeps the job and its surviving nodes (`--requeue=expedite`)."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.recovery.classify_failure import RECORD_GRACE
from orchestrator.states import RunState
from tests.fakes.model_slurm import SlurmFaults
from tests.scenarios.world import World, config, training
from trainer.protocol.failures.outcome import FailureKind


def world_with_sluids(root: Path, **recovery: Any) -> World:
    data = config(**{"backoff": 1.0, **recovery})
    data["cluster"]["nodes"] = 2
    world = World(root, data=data)
    world.slurm.sluids = True
    return world


def cancels(world: World) -> int:
    return world.slurm.calls.count("cancel 1")


def test_the_next_attempt_continues_in_the_job_that_slurm_requeued(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    dead = world.slurm.expedite(world.slurm.running()[0])
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    first, second = world.attempts
    assert first.failure is not None
    assert (first.failure["kind"], first.failure["node"]) == (FailureKind.NODE_LOST, dead)
    assert (first.job_id, first.sluid, first.restarts) == ("1", "s1.0", 0)
    assert (second.job_id, second.sluid, second.restarts) == ("1", "s1.1", 1)
    assert dead not in second.nodes
    assert cancels(world) == 0
    assert len(world.slurm.jobs) == 1


def test_each_failure_leads_to_one_attempt_in_the_same_job(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path)
    for step in (8, 18):
        training(world, step)
        world.slurm.expedite(world.slurm.running()[0])
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert [attempt.restarts for attempt in world.attempts] == [0, 1, 2]
    assert {attempt.job_id for attempt in world.attempts} == {"1"}


def test_a_requeue_without_accounting_is_a_lost_node_without_a_name(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    world.slurm.slurm_faults = SlurmFaults(accounting=False)
    world.slurm.expedite(world.slurm.running()[0])
    before = world.clock.now
    world.turns(60, 1.0, lambda: len(world.attempts) == 2)
    assert world.clock.now - before >= RECORD_GRACE
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert world.attempts[0].failure is not None
    assert world.attempts[0].failure["reason"] == "Slurm requeued job 1; accounting does not show why"


@pytest.mark.parametrize("cause", ["never", "held", "another requeue"])
def test_any_other_requeued_job_is_cancelled_and_a_new_one_follows(tmp_path: Path, cause: str) -> None:
    world = world_with_sluids(tmp_path, requeue="never" if cause == "never" else "auto")
    training(world, 12)
    (job,) = world.slurm.running()
    if cause == "another requeue":
        world.slurm.requeue(job)
    else:
        world.slurm.expedite(job)
        job.state, job.held = ("PENDING", True) if cause == "held" else (job.state, False)
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert [attempt.job_id for attempt in world.attempts] == ["1", "2"]
    assert cancels(world) <= 1


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "JobHeldUser", "job requeued in held state"])
def test_a_persons_hold_on_a_requeued_job_holds_the_run_until_its_release(tmp_path: Path, reason: str) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    (job,) = world.slurm.running()
    world.slurm.requeue(job)
    job.held, job.eligible, job.reason = True, 0.0, reason
    world.turns(120, 1.0)
    assert (job.held, cancels(world), len(world.slurm.jobs)) == (True, 0, 1)
    assert "a user holds it: `scontrol release 1`" in world.run.reason
    job.held = False
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert [attempt.job_id for attempt in world.attempts] == ["1", "1"]


def test_the_reason_shows_a_requeue_while_accounting_is_asked_for_its_cause(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    world.slurm.slurm_faults = SlurmFaults(accounting=False)
    world.slurm.expedite(world.slurm.running()[0])
    world.turns(3, 1.0)
    assert world.run.reason == "Slurm has requeued the job: waiting for accounting to show why"


def test_a_job_requeued_while_its_run_ends_is_cancelled(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path, max_failures=1, no_progress_hours=0.0)
    world.turns(60, 1.0, lambda: bool(world.slurm.running()))
    (job,) = world.slurm.running()
    world.turns(2, 1.0)
    world.slurm.expedite(job)
    world.turns(60, 1.0)
    assert world.run.state is RunState.HELD, world.run.reason
    assert not job.live


@pytest.mark.parametrize("later", [0, 1, 3, 6, 12])
def test_a_run_is_cancelled_at_every_point_of_a_requeue(tmp_path: Path, later: int) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    world.slurm.expedite(world.slurm.running()[0])
    world.turns(later, 1.0)
    world.store.add_user_request(world.name, "cancel", {"now": True}, world.clock.now)
    world.turns(90, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED
    world.turns(60, 1.0)
    assert not [job for job in world.slurm.jobs if job.live]


@pytest.mark.parametrize("later", [0, 1, 3, 6, 12])
def test_a_job_that_somebody_cancels_after_a_requeue_stays_cancelled(tmp_path: Path, later: int) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    (job,) = world.slurm.running()
    world.slurm.expedite(job)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(later, 1.0)
    world.slurm.end(job, "CANCELLED")
    world.turns(60, 1.0, lambda: world.run.state is RunState.HELD)
    assert (world.run.state, world.run.reason[:32]) == (RunState.HELD, "job 1 was cancelled, not by orch")
    assert len(world.slurm.jobs) == 1
    world.slurm.down = set()
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(10, 1.0, lambda: world.run.state is not RunState.HELD)
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED


def test_a_job_that_waits_for_replacements_is_cancelled_without_a_request_to_save(tmp_path: Path) -> None:
    world = world_with_sluids(tmp_path)
    training(world, 12)
    world.slurm.expedite(world.slurm.running()[0])
    world.slurm.down = set(world.slurm.nodes)
    world.turns(30, 1.0, lambda: len(world.attempts) == 2)
    world.turns(3, 1.0)
    world.store.add_user_request(world.name, "cancel", {"limit": 1e9}, world.clock.now)
    world.turns(10, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED


@pytest.mark.parametrize("point", ["before_next_intent", "after_next_intent", "before_go", "after_go"])
def test_a_controller_that_dies_while_it_continues_a_job_is_followed_by_one_that_does(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_with_sluids(tmp_path)
    monkeypatch.setattr("orchestrator.failpoints.reach", world.reach)
    training(world, 12)
    world.slurm.expedite(world.slurm.running()[0])
    kills = [point]
    world.kill_at = lambda reached: reached in kills and not kills.remove(reached)  # type: ignore[func-returns-value]
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert not kills
    assert [attempt.job_id for attempt in world.attempts] == ["1", "1"]
