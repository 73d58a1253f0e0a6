"""The controller is killed at every single failpoint; a new one finishes the run, one live job at most."""

import ast
from pathlib import Path

import pytest

import orchestrator
from orchestrator import failpoints
from orchestrator.registry.records import Run
from orchestrator.states import RunState
from tests.scenarios.world import World

IN_SUBMIT = {"after_create"}
"""Reached by `orch submit`, not by a controller's pass."""


def story(root: Path, monkeypatch: pytest.MonkeyPatch, victim: str, nth: int = 1) -> tuple[Run, set[str], World]:
    """A submit that doubles the job, training, a preemption, a second attempt, a cancel."""
    world = World(root)
    seen: list[str] = []

    def kill_at(point: str) -> bool:
        seen.append(point)
        return point == victim and seen.count(point) == nth

    world.kill_at = kill_at
    monkeypatch.setattr(failpoints, "reach", world.reach)
    submit = world.slurm.submit

    def twice(spec: object) -> None:
        submit(spec)  # type: ignore[arg-type]
        submit(spec)  # type: ignore[arg-type]

    monkeypatch.setattr(world.slurm, "submit", twice)
    world.turns(200, 2.0, lambda: world.run.step >= 10)
    world.slurm.preempt(world.slurm.running()[0])
    world.turns(200, 2.0, lambda: len(world.attempts) == 2 and world.run.step >= 16)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    return world.finish(300, 2.0), set(seen), world


def test_the_story_passes_every_failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen, _ = story(tmp_path, monkeypatch, "")
    assert run.state is RunState.CANCELLED
    assert seen | IN_SUBMIT == set(failpoints.POINTS)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", sorted(set(failpoints.POINTS) - IN_SUBMIT))
def test_killed_at(point: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, world = story(tmp_path, monkeypatch, point, nth)
    assert run.state is RunState.CANCELLED
    assert [attempt.number for attempt in world.attempts] == [1, 2]
    assert not [job for job in world.slurm.jobs if job.live]
    trained = [agents for agents in world.slurm.agents_of[world.name] if agents.trained]
    assert [agents.spec.attempt for agents in trained] == [1, 2]
    assert len({attempt.job_id for attempt in world.attempts}) == 2


def test_every_reach_is_in_the_list_and_every_name_is_reached() -> None:
    reached = {
        node.args[0].value
        for path in Path(orchestrator.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach"
        if isinstance(node.args[0], ast.Constant)
    }
    assert reached == {*failpoints.POINTS, *failpoints.REMOVAL_POINTS}
