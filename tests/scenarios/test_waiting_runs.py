"""Stories of runs that start after another one, and of a sweep, while the controller is killed anywhere."""

import shutil
from pathlib import Path

import pytest

from orchestrator import failpoints
from orchestrator.states import RunState
from tests.fakes.new_runs import create_run
from tests.scenarios.world import World, config


def add(world: World, root: Path, nonce: int, **fields: object) -> str:
    run, _ = create_run(world.store, root, config(steps=10), total_steps=10, nonce=f"{nonce:08x}", **fields)
    return run.name


def until(world: World, name: str, *states: RunState) -> None:
    world.turns(2000, 2.0, lambda: world.store.run(name).state in states)
    found = world.store.run(name)
    assert found.state in states, found.reason


def jobs_of(world: World, name: str) -> int:
    return sum(bool(one.job_id) for one in world.store.submissions(name))


def test_a_run_starts_once_the_other_has_succeeded(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(steps=10))
    later = add(world, tmp_path, 2, predecessor=world.name)
    world.turns(10, 1.0)
    assert world.store.run(later).reason == f"waits until {world.name} has succeeded, which is {world.run.state}"
    assert jobs_of(world, later) == 0
    until(world, later, RunState.SUCCEEDED)
    ended = [move.time for move in world.store.transitions(world.name) if move.after == RunState.SUCCEEDED]
    assert min(one.submitted_at for one in world.store.submissions(later)) >= ended[0]


@pytest.mark.parametrize("again", [True, False], ids=["both-resumed", "alone"])
def test_a_run_after_a_cancelled_one_is_held_until_it_is_resumed(tmp_path: Path, again: bool) -> None:
    world = World(tmp_path, data=config(steps=10))
    later = add(world, tmp_path, 2, predecessor=world.name)
    world.turns(2)
    world.store.add_user_request(world.name, "cancel", {"now": True}, world.clock.now)
    until(world, later, RunState.HELD)
    held = world.store.run(later)
    assert held.reason.startswith(f"was to start after {world.name}, which is CANCELLED")
    assert held.reason.endswith(f"orch resume {later}")
    assert jobs_of(world, later) == 0
    for name in [world.name, later] if again else [later]:
        world.store.add_user_request(name, "resume", {}, world.clock.now)
        world.turns(1)
    if again:
        assert world.store.run(later).predecessor == world.name
        assert jobs_of(world, later) == 0
    until(world, later, RunState.SUCCEEDED)
    assert world.run.state is (RunState.SUCCEEDED if again else RunState.CANCELLED)


def test_a_removed_run_is_not_confused_with_a_later_one_of_its_name(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(steps=10))
    first = add(world, tmp_path, 2, slug="first", now=world.clock.now)
    until(world, first, RunState.SUCCEEDED)
    removed = world.store.run(first)
    later = add(
        world, tmp_path, 3, slug="later", predecessor=first, predecessor_created_at=removed.created_at
    )  # fmt: skip
    world.store.begin_removal(first)
    world.store.delete_run(first)
    shutil.rmtree(removed.run_dir)
    assert add(world, tmp_path, 4, slug="first", now=world.clock.now) == first
    until(world, later, RunState.HELD)
    assert world.store.run(later).reason.startswith(f"was to start after {first}, which has been removed")
    until(world, first, RunState.SUCCEEDED)
    world.store.add_user_request(later, "resume", {}, world.clock.now)
    until(world, later, RunState.SUCCEEDED)
    assert world.store.run(later).predecessor == "", "resumed, it waits for no run"


def test_waiting_runs_need_no_queries_and_start_soon_after_the_other_has_ended(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(steps=10))
    world.controller.quiet = 300.0
    later = add(world, tmp_path, 2, predecessor=world.name)
    until(world, later, RunState.SUCCEEDED)
    (ended,) = [move.time for move in world.store.transitions(world.name) if move.after == RunState.SUCCEEDED]
    assert world.store.submissions(later)[0].submitted_at - ended <= 10.0
    last = add(world, tmp_path, 3, predecessor=add(world, tmp_path, 4, predecessor=later, slug="held"))
    world.store.add_user_request(world.store.run(last).predecessor, "cancel", {}, world.clock.now)
    until(world, last, RunState.HELD)


def test_a_waiting_run_is_cancelled_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(steps=10))
    later = add(world, tmp_path, 2, predecessor=world.name)
    world.store.add_user_request(later, "cancel", {}, world.clock.now)
    world.turns(3)
    assert world.store.run(later).state is RunState.CANCELLED
    assert jobs_of(world, later) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_sweep_never_has_too_many_unfinished_runs_and_loses_none(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, seed, data=config(steps=10))
    monkeypatch.setattr(failpoints, "reach", world.reach)
    world.kill_at = lambda point: world.rng.random() < 0.01
    names = [
        add(world, tmp_path, 2 + number, slug="s", sweep={
            "name": "s", "limit": 2, "point": {"train.seed": str(number)}, "base": "",
        })
        for number in range(5)
    ]  # fmt: skip
    most, lives = 0, world.lives

    def over() -> bool:
        nonlocal most
        submitted = {one.run for one in world.store.submissions()}
        runs = [run for run in map(world.store.run, names) if run.state is not RunState.SUCCEEDED]
        most = max(most, sum(run.name in submitted for run in runs))
        return not runs

    world.turns(3000, 2.0, over)
    assert over(), [world.store.run(name).reason for name in names]
    assert most == 2
    assert world.lives > lives or seed, "the controller was killed in at least one of the stories"
    first = [min(one.submitted_at for one in world.store.submissions(name)) for name in names]
    assert all(one <= later for one, later in zip(first, first[2:], strict=False)), "the oldest start first"
