"""Stories of effects that do not take: jobs that others requeue, cancels and releases that change nothing."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.controller.reconcile import Controller
from orchestrator.recovery.classify_failure import LOST_AFTER, RECORD_WITHIN
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState, RunState
from tests.fakes.memory_store import MemoryStore
from tests.fakes.model_slurm import ModelJob, SlurmFaults
from tests.fakes.new_runs import create_run, take_lease
from tests.scenarios.world import World, config, training
from trainer.protocol.failures.outcome import FailureKind


def requeued(world: World, point: str) -> None:
    """Requeue the first job from outside, at one point of its life."""
    if point == "at its start":
        world.turns(60, 1.0, lambda: bool(world.slurm.running()))
    elif point == "before it is seen to run":
        while not world.slurm.running():
            world.tick()
            world.slurm.step(1.0)
    else:
        training(world, 12)
    world.slurm.requeue(world.slurm.running()[0])


def calls(world: World, call: str) -> int:
    return world.slurm.calls.count(call)


@pytest.mark.parametrize("accounting", [True, False])
@pytest.mark.parametrize("point", ["before it is seen to run", "at its start", "while it trains"])
def test_a_job_that_somebody_requeues_is_cancelled_once_and_the_run_goes_on(
    tmp_path: Path, point: str, accounting: bool
) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(accounting=accounting)
    requeued(world, point)
    assert world.finish(seconds=1.0).state is RunState.SUCCEEDED
    assert len(world.attempts) == 2
    assert calls(world, "cancel 1") == 1
    assert world.attempts[0].failure is not None
    assert "requeued job 1" in world.attempts[0].failure["reason"]


@pytest.mark.parametrize("later", [0, 1, 3, 6])
def test_a_run_whose_job_was_requeued_can_be_cancelled_at_every_point(tmp_path: Path, later: int) -> None:
    world = World(tmp_path, data=config(steps=4000, every=5))
    requeued(world, "while it trains")
    world.turns(later, 1.0)
    world.store.add_user_request(world.name, "cancel", {"now": True}, world.clock.now)
    world.turns(60, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED
    assert not [job for job in world.slurm.jobs if job.live]
    assert world.store.user_requests() == []
    assert calls(world, "cancel 1") <= 2


def test_a_cancel_that_changes_nothing_is_repeated_ever_more_rarely(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    really, asked = world.slurm.cancel, list[str]()
    world.slurm.cancel = asked.append  # type: ignore[method-assign]
    (job,) = world.slurm.running()
    world.slurm.requeue(job)
    job.eligible = world.clock.now + 7200.0
    world.turns(300, 1.0)
    assert 5 <= len(asked) <= 10
    assert len(world.attempts) == 1
    world.slurm.cancel = really  # type: ignore[method-assign]
    assert world.finish().state is RunState.SUCCEEDED


def test_a_release_that_changes_nothing_is_repeated_ever_more_rarely(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(60, 1.0, lambda: bool(world.slurm.jobs))
    world.slurm.jobs[0].shown = {"held": True, "reason": "BadConstraints"}
    world.turns(300, 1.0)
    assert 5 <= calls(world, "release 1") <= 10
    world.slurm.jobs[0].shown, world.slurm.down = {}, set()
    assert world.finish().state is RunState.SUCCEEDED


def test_an_accounting_that_never_answers_keeps_no_run_from_training(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, accounting_silent=True)
    training(world, 12)
    world.slurm.preempt(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 2


def test_accounting_is_waited_for_to_name_the_cause_and_not_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.slurm_faults = SlurmFaults(accounting_silent=True)
    world.slurm.forget(world.slurm.running()[0])
    gone = world.clock.now
    world.turns(400, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert RECORD_WITHIN <= world.clock.now - gone < RECORD_WITHIN + LOST_AFTER
    assert world.attempts[0].failure is not None
    assert world.attempts[0].failure["reason"].endswith("its accounting does not answer")
    assert world.finish().state is RunState.SUCCEEDED


@pytest.mark.parametrize("ending", [{"exit_code": 3}, {"signal": 9}, {}])
def test_a_batch_script_that_never_works_uses_up_its_tries_however_it_ends(
    tmp_path: Path, ending: dict[str, int]
) -> None:
    world = World(tmp_path, data=config(max_failures=3, backoff=1.0, backoff_max=2.0))

    def script_fails(job: ModelJob) -> None:
        job.state, job.started, job.ended, job.shown = "FAILED", world.clock.now, world.clock.now, dict(ending)

    world.slurm._start = script_fails  # type: ignore[method-assign]
    world.turns(200, 1.0, lambda: world.run.state is RunState.FAILED)
    assert world.run.state is RunState.FAILED, world.run.reason
    assert len(world.attempts) == 3
    assert {attempt.failure["kind"] for attempt in world.attempts if attempt.failure} == {FailureKind.LAUNCH_FAILED}
    assert "launch failed 3 times without a new checkpoint: recovery.max_failures is spent" in world.run.reason


FOREVER: dict[str, Any] = config(steps=4000)


def without_leader(root: Path, **recovery: Any) -> tuple[World, ModelJob]:
    """A job with a spare node, whose first node has died: Slurm takes it out, and the job stays."""
    data = config(steps=4000, **recovery)
    data["cluster"] |= {"nodes": 1, "spare_nodes": 1}
    world = World(root, data=data)
    world.turns(12)
    job = world.slurm.running()[0]
    assert job.agents is not None
    job.agents.dead, job.nodes = True, job.nodes[1:]
    return world, job


@pytest.mark.parametrize("cancelled", [False, True], ids=["held", "cancelled"])
def test_a_job_without_its_leader_is_ended_although_its_run_needs_nobody_any_more(
    tmp_path: Path, cancelled: bool
) -> None:
    world, job = without_leader(tmp_path, max_failures=1, no_progress_hours=0)
    if cancelled:
        world.store.add_user_request(world.name, "cancel", {"limit": 1e9}, world.clock.now)
    for _ in range(60):
        world.controller.tick(world.lease)
        world.slurm.step(5.0)
    assert world.run.state is (RunState.CANCELLED if cancelled else RunState.HELD)
    assert job.state == "CANCELLED"


def test_a_requeued_job_that_orch_ended_is_no_person_s_scancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, data=FOREVER)
    world.turns(10)
    world.slurm.requeue(world.slurm.running()[0])
    world.tick()
    told = world.slurm._status

    def accounted(job: ModelJob) -> JobStatus:
        """Accounting has no count of restarts."""
        return replace(told(job), restarts=0, source="accounting") if job.ended else told(job)

    monkeypatch.setattr(world.slurm, "_status", accounted)
    world.turns(3, 301.0, lambda: world.attempts[0].failure is not None)
    assert world.attempts[0].failure is not None
    assert world.attempts[0].failure["kind"] == FailureKind.NODE_LOST
    assert world.run.state is RunState.RECOVERING


def test_the_job_of_another_registry_s_run_of_that_name_is_left_alone(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours, store = World(tmp_path / "ours", data=FOREVER), MemoryStore()
    run, _ = create_run(store, tmp_path / "theirs", FOREVER, total_steps=4000, now=ours.clock.now, nonce="99999999")
    assert run.name == ours.name
    lease = take_lease(store, "login:9:0", ours.clock.now, 60.0)
    theirs = Controller(store, {"slurm": ours.slurm}, clock=ours.clock.as_clock())  # type: ignore[arg-type]
    theirs.rng = Random(1)
    for _ in range(8):
        ours.controller.tick(ours.lease)
        theirs.tick(lease)
        ours.slurm.step(2.0)
    (tmp_path / "theirs" / run.name).rename(tmp_path / "away")
    store.add_user_request(run.name, "cancel", {}, ours.clock.now)
    for _ in range(8):
        theirs.tick(lease)
        ours.slurm.step(2.0)
    assert {job.spec.name: job.state for job in ours.slurm.jobs} == {
        f"orch-{run.name}-1-00000001": "RUNNING", f"orch-{run.name}-1-99999999": "CANCELLED",
    }  # fmt: skip
    assert store.run(run.name).state is RunState.CANCELLED
