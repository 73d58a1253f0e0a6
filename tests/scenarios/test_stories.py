"""Stories of single runs: what happened, and what the registry says about it afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.actor import AMBIGUOUS_FOR
from orchestrator.controller.reconcile import Controller
from orchestrator.errors import ConfigError, Fenced, Precondition, RegistryError
from orchestrator.recovery.failures import LEAVING_LIMIT
from orchestrator.scheduler.base import UNREADABLE, JobStatus
from orchestrator.states import AttemptState, RunState, Trust
from tests.fakes.model_slurm import Weather
from tests.scenarios.world import World, config
from trainer.contract.events import EventKind, EventLog
from trainer.contract.launch import LaunchToken
from trainer.contract.outcome import Failure, FailureKind
from trainer.contract.requests import RequestKind, pending


def training(world: World, step: int) -> None:
    world.turns(300, 1.0, lambda: world.run.step >= step)
    assert world.run.step >= step


def moves(world: World, kind: str = "run") -> list[str]:
    return [move.after for move in world.store.transitions(world.name) if move.kind == kind]


def test_a_quiet_run_goes_from_intent_to_succeeded(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    assert moves(world) == ["QUEUED", "RUNNING", "SUCCEEDED"]
    assert moves(world, "attempt") == ["SUBMITTED", "RUNNING", "ENDED"]
    assert world.run.step == 40
    assert [item.step for item in world.store.checkpoints(world.name)] == [40, 35, 30, 25, 20, 15, 10, 5]
    assert world.store.nodes()[0].attempts == 1


def test_a_preempted_run_goes_on_from_its_checkpoint_without_a_pause(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.preempt(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    first, second = world.attempts
    assert first.failure is not None
    assert first.failure["kind"] == FailureKind.PREEMPTED
    assert first.decision is not None
    assert first.decision["reason"] == "goes on after preempted"
    assert second.resumed_from == first.saved_step
    assert {item.trust for item in world.store.checkpoints(world.name) if item.step == second.resumed_from} == {
        Trust.RESTORED
    }
    assert moves(world) == ["QUEUED", "RUNNING", "RECOVERING", "QUEUED", "RUNNING", "SUCCEEDED"]


def test_a_dead_node_is_avoided_and_its_zombies_are_fenced(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    job = world.slurm.running()[0]
    assert job.agents is not None
    commits = len(job.agents.commits)
    world.slurm.fail_node(job, zombie=True)
    assert world.finish().state is RunState.SUCCEEDED
    first, second = world.attempts
    assert first.failure is not None
    assert first.failure["kind"] == FailureKind.NODE_LOST
    assert set(second.nodes).isdisjoint(first.nodes)
    assert len(job.agents.commits) - commits <= 1
    assert not world.folder.attempt(1).go.exists()


def test_an_ambiguous_submit_is_looked_up_and_never_repeated_blindly(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.weather = Weather(ambiguous=1.0)
    world.turns(3, 1.0)
    assert [call for call in world.slurm.calls if call.startswith("submit")] == [f"submit {world.attempts[0].job_name}"]
    assert world.attempts[0].job_id == "1"


def test_a_submit_that_vanished_is_repeated_after_a_minute_of_answers(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.weather = Weather(ambiguous=1.0, lost=1.0)
    world.tick()
    begun = world.clock.now
    world.slurm.weather = Weather()
    world.turns(200, 1.0, lambda: world.attempts[0].job_id is not None)
    assert AMBIGUOUS_FOR <= world.clock.now - begun <= AMBIGUOUS_FOR + 5
    assert len([call for call in world.slurm.calls if call.startswith("submit")]) == 2
    assert len(world.attempts) == 1


def test_silence_in_between_begins_the_minute_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.weather = Weather(ambiguous=1.0, lost=1.0)
    world.turns(40, 1.0)
    world.slurm.reachable = False
    world.turns(3, 1.0)
    world.slurm.reachable, silent = True, world.clock.now
    world.slurm.weather = Weather()
    world.turns(200, 1.0, lambda: world.attempts[0].job_id is not None)
    assert world.clock.now - silent >= AMBIGUOUS_FOR


def test_a_late_duplicate_is_cancelled_and_never_let_go(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    spec = world.slurm.jobs[0].spec
    world.slurm.submit(spec)
    world.turns(40, 1.0)
    assert [(job.job_id, job.held) for job in world.slurm.jobs if job.state == "CANCELLED"] == [("2", True)]
    assert world.finish().state is RunState.SUCCEEDED


def test_a_stranger_s_job_with_our_prefix_is_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    world, other = World(tmp_path / "a"), World(tmp_path / "b")
    other.tick()
    stranger = other.slurm.jobs[0]
    world.slurm.jobs.append(stranger)
    stranger.job_id = "99"
    stranger.spec = type(stranger.spec)(**{**vars(stranger.spec), "name": "orch-theirs-1-deadbeef", "comment": "x"})
    world.finish()
    assert "cancel 99" not in world.slurm.calls


def test_a_refused_job_holds_the_run_with_slurm_s_words(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.weather = Weather(reject="Invalid account or account/partition combination specified")
    assert world.finish().state is RunState.HELD
    assert "Invalid account" in world.run.reason
    assert f"orch resume {world.name}" in world.run.reason
    world.slurm.weather = Weather()
    world.store.ask(world.name, "resume", {}, world.clock.now)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert world.run.fresh_from == 2


def test_a_value_that_sbatch_must_not_see_holds_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)

    def refuse(spec: object) -> None:
        raise ConfigError("cluster.partition: a line break", hint="cluster.partition=NAME")

    monkeypatch.setattr(world.slurm, "submit", refuse)
    assert world.finish().state is RunState.HELD
    assert "a line break; cluster.partition=NAME" in world.run.reason


def test_a_lost_job_needs_a_minute_of_answers_and_of_silence(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.forget(world.slurm.running()[0])
    gone = world.clock.now
    world.turns(200, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert world.clock.now - gone >= 60
    assert world.finish().state is RunState.SUCCEEDED


def test_a_lost_job_that_comes_back_is_ended_before_its_successor_begins(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    job = world.slurm.running()[0]
    world.slurm.hidden.add(job.job_id)
    world.turns(200, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert job.agents is not None
    job.agents.dead = True  # stuck: its fence alone would have ended it
    world.slurm.hidden.clear()
    world.slurm.cancel = lambda job_id: None  # type: ignore[method-assign]
    world.turns(60, 1.0)
    assert len(world.attempts) == 1
    assert "waits until job 1 has left the queue" in world.run.reason
    del world.slurm.cancel
    assert world.finish().state is RunState.SUCCEEDED
    assert job.ended is not None
    assert world.attempts[1].intent_at >= job.ended


def test_a_reused_id_is_not_taken_for_the_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    lost = world.slurm.jobs.pop()
    other = type(lost.spec)(**{**vars(lost.spec), "name": "somebody-else", "comment": "x"})
    world.slurm._next_id = 1
    world.slurm.submit(other)
    world.turns(100, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert world.attempts[0].state is AttemptState.LOST
    assert world.slurm.jobs[0].state == "PENDING"


def test_a_user_s_bug_fails_the_run_at_once_and_can_be_resumed(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents.fail(Failure(kind=FailureKind.USER_ERROR, reason="ValueError: no"))
    assert world.finish().state is RunState.FAILED
    assert world.run.reason.startswith("the training code failed: ValueError: no")
    assert len(world.attempts) == 1


def test_a_run_that_gets_nowhere_is_held(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(every=30, no_progress=3))
    for _ in range(3):
        world.turns(400, 1.0, lambda: bool(world.slurm.running()) and world.slurm.running()[0].agents.training)
        world.slurm.running()[0].agents.fail(Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 died"))
        world.turns(12, 1.0)
    assert world.run.state is RunState.HELD
    assert "3 attempts in a row made no new checkpoint" in world.run.reason


def test_cancel_saves_first_and_is_answered_when_the_job_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.turns(1)
    assert world.run.state is RunState.RUNNING
    assert world.finish().state is RunState.CANCELLED
    assert world.attempts[0].saved_step == world.slurm.agents_of[world.name][0].step_done
    assert f"newest checkpoint is of step {world.attempts[0].saved_step}" in world.run.reason
    assert world.store.asks() == []


def test_cancel_does_not_wait_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents._listen = lambda: None  # type: ignore[method-assign]
    world.slurm.running()[0].agents.config = world.controller._configs[world.run.config_digest]  # type: ignore[union-attr]
    agents._train = lambda seconds: None  # type: ignore[method-assign]
    world.store.ask(world.name, "cancel", {"limit": 20}, world.clock.now)
    world.turns(60, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED


@pytest.mark.parametrize("turns", [0, 1])
def test_a_run_that_never_trained_is_cancelled_at_once(tmp_path: Path, turns: int) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(turns)
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.turns(4, 1.0)
    assert world.run.state is RunState.CANCELLED
    assert not [job for job in world.slurm.jobs if job.live]


def test_the_job_of_a_held_run_ends_before_the_run_is_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    # As `orch db rebuild` leaves a run whose record is lost.
    world.store.move_run(world.name, RunState.HELD, "rebuilt", epoch=world.lease.epoch, now=world.clock.now)
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.tick()
    assert world.run.state is RunState.RECOVERING
    assert world.finish().state is RunState.CANCELLED
    assert not [job for job in world.slurm.jobs if job.live]
    assert world.attempts[0].saved_step == world.slurm.agents_of[world.name][0].step_done
    assert world.store.asks() == []


def test_a_run_is_not_held_while_its_job_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    release = world.slurm.release

    def refuse(job_id: str, submission: object) -> None:
        raise Precondition("the submission of the job is gone")

    monkeypatch.setattr(world.slurm, "release", refuse)
    report = world.controller.tick(world.lease)
    assert [error.split(":")[0] for error in report.errors] == [world.name]
    assert world.run.state is RunState.QUEUED
    assert "the submission of the job is gone" in world.run.reason
    monkeypatch.setattr(world.slurm, "release", release)
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


def test_a_run_whose_folder_cannot_be_made_can_be_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.folder.make()
    assert world.finish().state is RunState.HELD
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.turns(3, 1.0)
    assert world.run.state is RunState.CANCELLED
    assert world.store.asks() == []


def test_a_cancelled_run_resumes_from_what_was_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.finish()
    world.store.ask(world.name, "resume", {}, world.clock.now)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert world.attempts[1].resumed_from == world.attempts[0].saved_step


def test_asks_that_make_no_sense_are_answered(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 5)
    world.store.ask(world.name, "resume", {}, world.clock.now)
    world.store.ask("nobody", "cancel", {}, world.clock.now)
    world.finish()
    world.store.ask(world.name, "cancel", {}, world.clock.now)
    world.tick()
    answers = [ask.answer for ask in world.store.asks(pending=False)]
    assert answers == ["sim-1 is RUNNING: there is nothing to resume", "there is no run nobody",
                       "sim-1 is SUCCEEDED already"]  # fmt: skip


def test_a_requeued_job_is_ended_and_followed_by_a_new_attempt(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.requeue(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    assert world.attempts[0].failure is not None
    assert "requeued job 1" in world.attempts[0].failure["reason"]


def test_a_job_stuck_in_completing_is_fenced_and_left_behind(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.end(world.slurm.running()[0], "PREEMPTED", wait=99999.0)
    world.turns(int(LEAVING_LIMIT) // 10 - 2, 10.0)
    assert len(world.attempts) == 1
    assert world.finish().state is RunState.SUCCEEDED


def test_the_deadline_is_told_once_for_each_attempt(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    told = [item for item in pending(world.folder.requests, 1, set()) if item.kind is RequestKind.DEADLINE]
    assert [item.value for item in told] == [world.slurm.running()[0].started + 3600.0]  # type: ignore[operator]


def test_go_lists_what_may_be_inherited_and_leaves_the_corrupt_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 22)
    newest = world.store.checkpoints(world.name)[0].name
    log = EventLog(world.folder.attempt(1).event_file("agent-0001"), "agent-0001", 1, clock=world.clock)
    log.write(EventKind.CHECKPOINT_REFUSED, step=20, name=newest, reason="chunk 3 differs")
    world.tick()
    assert world.store.checkpoints(world.name)[0].trust is Trust.CORRUPT
    world.slurm.preempt(world.slurm.running()[0])
    world.turns(100, 1.0, lambda: world.folder.attempt(2).go.is_file())
    token = LaunchToken.read(world.folder.attempt(2).go)
    listed = token.checkpoints
    assert newest not in listed
    assert token.over == (f"001-{world.attempts[0].nonce}",)
    assert len(listed) == len(world.store.checkpoints(world.name)) - 1


def test_a_paused_controller_cannot_act_after_another_took_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    paused, lease = world.controller, world.lease
    world.start_controller()
    before = list(world.slurm.calls)
    with pytest.raises(Fenced):
        paused.tick(lease)
    assert world.slurm.calls == before


def test_the_lease_is_renewed_between_slow_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.clock.advance(1000.0)
    poll, find = world.slurm.poll, world.slurm.find
    left: list[float] = []

    def slow(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(asked: Any) -> Any:
            held = world.store.lease()
            assert held is not None
            left.append(held.expires_at - world.clock.now)
            world.clock.advance(50.0)
            return answer(asked)

        return call

    monkeypatch.setattr(world.slurm, "poll", slow(poll))
    monkeypatch.setattr(world.slurm, "find", slow(find))
    world.controller.tick(world.lease)
    held = world.store.lease()
    assert held is not None
    assert left == [60.0, 60.0]
    assert held.expires_at - world.clock.now == 60.0


def test_an_old_go_that_comes_back_is_taken_away_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    late = LaunchToken.read(world.folder.attempt(1).go)
    world.slurm.preempt(world.slurm.running()[0])
    world.turns(100, 1.0, lambda: len(world.attempts) == 2 and world.attempts[1].state is AttemptState.RUNNING)
    late.write(world.folder.attempt(1).go)
    world.tick()
    assert not world.folder.attempt(1).go.exists()
    assert world.folder.attempt(2).go.exists()


def test_a_go_in_force_is_never_rewritten_by_a_later_controller(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    token = LaunchToken.read(world.folder.attempt(1).go)
    world.start_controller()
    world.slurm.jobs[0].held = True
    world.tick()
    assert not world.slurm.jobs[0].held
    assert LaunchToken.read(world.folder.attempt(1).go) == token
    assert world.lease.epoch > token.epoch


def test_one_run_s_trouble_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    run, _ = world.store.create_run(
        slug="bad", cluster="slurm", root=tmp_path, config_digest="missing", total_steps=1, identity={}, now=0.0,
        nonce="00000002",
    )  # fmt: skip
    controller = Controller(world.store, {"slurm": world.slurm}, clock=world.clock.as_clock())
    report = controller.tick(world.lease)
    assert [error.split(":")[0] for error in report.errors] == ["bad-2"]
    assert world.attempts[0].state is AttemptState.SUBMITTED
    assert "cannot serve this run" in world.store.run(run.name).reason


@pytest.mark.parametrize("trouble", [OSError("stale file handle"), ValueError("not JSON"), Precondition("no squeue")])
def test_whatever_keeps_an_answer_away_is_silence(
    tmp_path: Path, trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    training(world, 12)

    def fail(ids: list[str]) -> object:
        raise trouble

    with monkeypatch.context() as patch:
        patch.setattr(world.slurm, "poll", fail)
        report = world.controller.tick(world.lease)
        assert (report.unreachable, report.errors) == (("slurm",), ())
        assert str(trouble) in world.run.reason
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


def test_a_job_whose_record_cannot_be_read_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    training(world, 12)
    broken = JobStatus(job_id="", name=world.attempts[0].job_name, state=UNREADABLE, reason="is not JSON")
    with monkeypatch.context() as patch:
        patch.setattr(world.slurm, "poll", lambda ids: {broken.name: broken})
        patch.setattr(world.slurm, "find", lambda prefix: [broken])
        for _ in range(20):
            world.clock.advance(20.0)
            report = world.controller.tick(world.lease)
        assert (report.unreachable, report.errors) == ((), ())
        assert world.attempts[0].state is AttemptState.RUNNING
        assert "cannot be read: is not JSON" in world.run.reason
    assert not [call for call in world.slurm.calls if call.startswith("cancel")]
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 1


def test_a_damaged_config_is_its_run_s_trouble_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.store.create_run(
        slug="bad", cluster="slurm", root=tmp_path, config_digest="damaged", total_steps=1, identity={}, now=0.0,
        nonce="00000002",
    )  # fmt: skip
    read = world.store.config

    def config_of(digest: str) -> object:
        if digest == "damaged":
            raise RegistryError("config damaged is damaged")
        return read(digest)

    monkeypatch.setattr(world.store, "config", config_of)
    report = world.controller.tick(world.lease)
    assert [error.split(":")[0] for error in report.errors] == ["bad-2"]
    assert world.attempts[0].state is AttemptState.SUBMITTED


def test_a_folder_of_another_registry_holds_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.folder.make()
    assert world.finish().state is RunState.HELD
    assert "belongs to another run" in world.run.reason
    assert world.slurm.jobs == []


def test_a_scheduler_that_this_machine_lacks_is_silence(tmp_path: Path) -> None:
    world = World(tmp_path)
    controller = Controller(world.store, {}, clock=world.clock.as_clock())
    report = controller.tick(world.lease)
    assert report.unreachable == ("slurm",)
    assert report.silence == ("slurm cannot be used on this machine",)
    assert world.attempts[0].state is AttemptState.INTENT


def test_silence_in_the_middle_of_a_pass_is_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    answers = world.slurm.submit

    def fall_silent(spec: object) -> None:
        answers(spec)  # type: ignore[arg-type]
        world.slurm.reachable = False

    monkeypatch.setattr(world.slurm, "submit", fall_silent)
    report = world.controller.tick(world.lease)
    assert report.unreachable == ("slurm",)
    assert "Unable to contact slurm controller" in report.silence[0]
    assert world.attempts[0].state is AttemptState.INTENT
