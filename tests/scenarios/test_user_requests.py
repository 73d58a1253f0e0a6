"""Stories of people who ask: cancel, resume, and what makes no sense."""

import shutil
import socket
from pathlib import Path

import pytest

from orchestrator.registry.records import UserRequest
from orchestrator.registry.tables import insertion
from orchestrator.states import RunState
from tests.fakes.model_slurm import SlurmFaults
from tests.scenarios.world import World, config, training
from trainer.protocol.config import load


def test_cancel_saves_first_and_is_answered_when_the_job_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(1)
    assert world.run.state is RunState.RUNNING
    assert world.finish().state is RunState.CANCELLED
    assert world.attempts[0].saved_step == world.slurm.agents_of[world.name][0].step_done
    assert f"newest checkpoint has step {world.attempts[0].saved_step}" in world.run.reason
    assert world.store.user_requests() == []


@pytest.mark.parametrize("lost", ["", "checkpoints"])
def test_cancel_promises_no_checkpoint_that_is_gone(tmp_path: Path, lost: str) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.preempt(world.slurm.running()[0])
    world.turns(100, 1.0, lambda: world.run.state is RunState.RECOVERING)
    assert world.run.state is RunState.RECOVERING
    for path in (world.folder.path / lost).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    assert world.finish().state is RunState.CANCELLED
    step = max(attempt.saved_step or 0 for attempt in world.attempts)
    said = "its folder is gone" if lost else f"the run directory is not visible on {socket.gethostname()}"
    assert f"the newest checkpoint had step {step}, and {said}" in world.run.reason


def test_cancel_does_not_wait_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents._listen = lambda: None  # type: ignore[method-assign]
    agents._train = lambda seconds: None  # type: ignore[method-assign]
    world.store.add_user_request(world.name, "cancel", {"limit": 20}, world.clock.now)
    world.turns(60, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED


@pytest.mark.parametrize("turns", [0, 1])
def test_a_run_that_never_trained_is_cancelled_at_once(tmp_path: Path, turns: int) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(turns)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(4, 1.0)
    assert world.run.state is RunState.CANCELLED
    assert not [job for job in world.slurm.jobs if job.live]


def test_a_run_to_be_cancelled_says_what_it_waits_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, lost=1.0)
    world.kill_at = lambda point: point == "after_sbatch"
    world.tick()
    world.kill_at = lambda point: False
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(1)
    assert world.run.reason == "will be cancelled: waits until it is certain that no job was submitted"
    assert world.finish().state is RunState.CANCELLED


def test_the_job_of_a_held_run_ends_before_the_run_is_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    # As `orch db rebuild` leaves a run whose record is lost.
    world.store.move_run(world.name, RunState.HELD, "rebuilt", epoch=world.lease.epoch, now=world.clock.now)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.tick()
    assert world.run.state is RunState.RECOVERING
    assert world.finish().state is RunState.CANCELLED
    assert not [job for job in world.slurm.jobs if job.live]
    assert world.attempts[0].saved_step == world.slurm.agents_of[world.name][0].step_done
    assert world.store.user_requests() == []


def test_a_run_whose_folder_cannot_be_made_can_be_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.folder.make()
    assert world.finish().state is RunState.HELD
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(3, 1.0)
    assert world.run.state is RunState.CANCELLED
    assert world.store.user_requests() == []


def test_a_cancelled_run_resumes_from_what_was_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.finish()
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert world.attempts[1].resumed_from == world.attempts[0].saved_step


def test_a_request_that_cannot_be_done_is_answered_and_harms_no_other_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    odd = world.store.put_config({**config(steps=60), "train": 60})
    asked = world.store.add_user_request(world.name, "resume", {"config": odd}, 0.0)
    world.turns(1)
    (request,) = [one for one in world.store.user_requests(pending=False) if one.id == asked]
    assert request.answer.startswith("refused: the controller cannot do it: TypeError: ")
    assert world.run.state is RunState.SUCCEEDED


def test_a_run_goes_on_with_what_a_person_changed(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    first = world.run.config_digest
    longer = world.store.put_config(config(steps=60))
    world.store.add_user_request(world.name, "resume", {"config": longer, "identity": {"code": "new"}}, 0.0)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert (world.run.step, world.run.total_steps, world.run.identity) == (60, 60, {"code": "new"})
    assert [attempt.config_digest for attempt in world.attempts] == [first, longer]
    assert world.attempts[1].resumed_from == 40
    folder = world.folder
    assert [load(folder, number).train.steps for number in (0, 1, 2)] == [40, 40, 60]
    assert [agents.token.config_digest for agents in world.slurm.agents_of[world.name]] == [first, longer]
    assert not folder.attempt(1).config.exists(), "it has what the run was submitted with"


def test_a_run_that_was_never_submitted_starts_with_what_a_person_changed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(reject="invalid partition specified: nope")
    world.turns(400, 5.0, lambda: world.run.state is RunState.HELD)
    assert world.run.state is RunState.HELD
    world.slurm.slurm_faults = SlurmFaults()
    shorter = world.store.put_config(config(steps=20))
    world.store.add_user_request(world.name, "resume", {"config": shorter}, 0.0)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert (world.run.step, world.attempts[-1].config_digest) == (20, shorter)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"base": "another"}, "the configuration of sim-1 has changed since this was typed"),
        ({"config": "f" * 64}, "the new configuration cannot be read"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(tmp_path: Path, args: dict[str, str], why: str) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    longer = world.store.put_config(config(steps=60))
    world.store.add_user_request(world.name, "resume", {"config": longer, **args}, 0.0)
    world.turns(1)
    (request,) = world.store.user_requests(pending=False)
    assert request.answer.startswith("refused: ")
    assert why in request.answer
    assert (world.run.state, world.run.total_steps) == (RunState.SUCCEEDED, 40)


def test_asks_that_make_no_sense_are_answered(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 5)
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.store.ignore_references()
    request = {"run": "nobody", "verb": "cancel", "args": {}, "asked_at": world.clock.now, "answer": ""}
    world.store.together(lambda: world.store.database.execute(insertion(UserRequest), request))
    world.finish()
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.tick()
    answers = [ask.answer for ask in world.store.user_requests(pending=False)]
    assert answers == ["sim-1 is RUNNING: there is nothing to resume", "there is no run nobody",
                       "sim-1 is already SUCCEEDED"]  # fmt: skip
