"""Paused processes in the model: a controller that wakes in the middle of a pass, a coordinator, a hung run folder."""

from pathlib import Path
from random import Random

import pytest

from orchestrator import failpoints
from orchestrator.errors import Fenced
from orchestrator.recovery.classify_failure import GRACE
from orchestrator.registry.lease import LEASE_TTL
from orchestrator.states import RunState
from tests.fakes.hung_files import HungFiles
from tests.fakes.new_runs import create_run
from tests.scenarios.world import World, training


class Paused:
    """The controller is stopped at its next arrival at a point; meanwhile another one goes on for `turns`."""

    def __init__(self, world: World, point: str, turns: int, seconds: float) -> None:
        self.world, self.point, self.turns, self.seconds = world, point, turns, seconds
        self.stopped = 0

    def reach(self, point: str) -> None:
        if point != self.point or self.stopped:
            return
        self.stopped += 1
        self.world.take_over()
        self.world.turns(self.turns, self.seconds)


@pytest.mark.parametrize("point", [one for one in failpoints.POINTS if one != "after_create"])
@pytest.mark.parametrize("turns", [0, 3, 60])
def test_a_controller_that_wakes_in_the_middle_of_a_pass_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, turns: int
) -> None:
    world = World(tmp_path, seed=turns)
    world.slurm.slurm_faults.ambiguous = 0.3
    paused = Paused(world, point, turns, 5.0)
    monkeypatch.setattr(failpoints, "reach", paused.reach)
    for turn in range(120):
        if world.run.state in (RunState.SUCCEEDED, RunState.CANCELLED):
            break
        if turn == 20 and (running := world.slurm.running()):
            world.slurm.preempt(running[0])
        controller, lease = world.controller, world.lease
        try:
            controller.tick(lease)
        except Fenced:
            assert paused.stopped == 1, "only the one that was paused is fenced"
        world.check()
        world.slurm.step(5.0)
    assert world.finish().state is RunState.SUCCEEDED
    monkeypatch.setattr(failpoints, "reach", lambda point: None)
    late = [job for job in world.slurm.jobs if job.live]
    assert all(job.held for job in late), "what was submitted after the end runs nothing"
    create_run(
        world.store, tmp_path, config_digest=world.run.config_digest, slug="next", now=world.clock.now, nonce="00000002"
    )
    world.turns(10, 10.0)
    assert not any(job.live for job in late), "and is swept with the next run"


def test_a_coordinator_that_stands_still_is_told_of_asked_and_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    frozen = world.slurm.agents_of[world.name][0]
    frozen.frozen = True
    world.turns(40, 5.0, lambda: "heartbeat silent" in world.run.reason)
    assert world.run.reason == "job 1 is RUNNING; heartbeat silent for 1 min"
    assert world.run.state is RunState.RUNNING
    began = world.clock.now
    world.turns(400, 5.0, lambda: "cancel 1" in world.slurm.calls)
    assert 800.0 <= world.clock.now - began <= 900.0 + GRACE + 60.0
    assert world.finish().state is RunState.SUCCEEDED
    first = world.attempts[0].failure
    assert first is not None
    assert (first["kind"], first["node"]) == ("agent_lost", None)
    assert "heartbeat silent for" in first["reason"]


def test_with_the_word_of_its_peers_it_takes_minutes_and_its_node_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    frozen = world.slurm.agents_of[world.name][0]
    frozen.frozen = True
    frozen.lose_coordinator()
    began = world.clock.now
    world.turns(200, 5.0, lambda: "cancel 1" in world.slurm.calls)
    assert world.clock.now - began <= 60.0 + 120.0 + GRACE + 30.0
    assert world.finish().state is RunState.SUCCEEDED
    first = world.attempts[0].failure
    assert first is not None
    assert (first["kind"], first["node"]) == ("agent_lost", frozen.nodes[0])


def test_a_coordinator_that_wakes_in_time_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents = world.slurm.agents_of[world.name][0]
    agents.frozen = True
    world.turns(36, 5.0)
    assert "heartbeat silent for 2 min" in world.run.reason
    agents.frozen = False
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


def test_a_suspended_job_is_left_alone_for_days(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    (job,) = world.slurm.running()
    assert job.agents is not None
    job.agents.frozen, job.state = True, "SUSPENDED"
    world.turns(300, 15.0)
    assert "cancel 1" not in world.slurm.calls
    job.agents.frozen, job.state = False, "RUNNING"
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_clock_that_is_set_ends_nothing(tmp_path: Path, jump: float) -> None:
    world = World(tmp_path)
    training(world, 12)
    frozen = world.controller.clock
    wall = frozen.wall
    moved = world.controller.actor.clock = world.controller.clock = type(frozen)(
        wall=lambda: wall() + jump, mono=frozen.mono
    )
    assert moved.wall() != wall()
    for _ in range(30):
        before = world.store.lease()
        world.controller.tick(world.lease)
        world.check()
        world.slurm.step(5.0)
        assert before is not None
    after = world.store.lease()
    assert after is not None
    assert after.renewed_at == pytest.approx(world.clock.now + jump, abs=LEASE_TTL), "it is renewed all the while"
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_folder_that_hangs_now_and_then_costs_no_work_and_no_second_job(tmp_path: Path, seed: int) -> None:
    world, rng = World(tmp_path, seed), Random(seed)
    files = HungFiles()
    for _ in range(80):
        world.controller.files = world.controller.actor.files = files
        files.hung = {world.folder.path} if rng.random() < 0.4 else set()
        if rng.random() < 0.05 and (running := world.slurm.running()):
            world.slurm.preempt(running[0])
        report = world.controller.tick(world.lease)
        assert all("has not answered" in error for error in report.errors)
        world.check()
        world.slurm.step(rng.choice([1.0, 5.0]))
    files.hung = set()
    assert world.finish().state is RunState.SUCCEEDED
