"""Stories of jobs that orch itself ends, or must not end: what is written down before, and whose they are."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.controller.reconcile import Controller
from orchestrator.registry.records import NewRun
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import RunState
from tests.fakes.memory_store import MemoryStore
from tests.fakes.model_slurm import ModelJob
from tests.scenarios.world import World, config
from trainer.protocol.failures.outcome import FailureKind

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
    run, _ = store.create_run(
        NewRun(
            slug="sim",
            cluster="slurm",
            root=tmp_path / "theirs",
            config_digest=store.put_config(FOREVER),
            total_steps=4000,
            identity={},
        ),
        now=ours.clock.now,
        nonce="99999999",
    )
    assert run.name == ours.name
    lease = store.take_lease("login:9:0", ours.clock.now, 60.0)
    assert lease is not None
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
