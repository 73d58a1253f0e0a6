"""Stories of controllers: one takes over from another, answers stay away, one run is in trouble."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.reconcile import Controller
from orchestrator.controller.scheduler_queries import SWEEP_RARELY
from orchestrator.errors import Fenced, Precondition, RegistryError
from orchestrator.registry.run_record import RunRecord
from orchestrator.registry.store import Store
from orchestrator.scheduler.interface import UNREADABLE, JobStatus
from orchestrator.states import AttemptState, RunState
from tests.fakes.new_runs import create_run
from tests.orchestrator.registry.newer_record import record_newer_attempt
from tests.scenarios.world import World, training
from trainer.protocol.launch_token import LaunchToken


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
    world.clock.advance(2 * SWEEP_RARELY)
    poll, find = world.slurm.poll, world.slurm.find
    left: list[float] = []

    def slow(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*asked: Any) -> Any:
            held = world.store.lease()
            assert held is not None
            left.append(held.expires_at - world.clock.now)
            world.clock.advance(50.0)
            return answer(*asked)

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


def test_a_hold_of_somebody_s_own_is_left_alone_and_one_that_slurm_has_forgotten_is_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(3, 1.0)
    (job,) = world.slurm.jobs
    assert (job.state, job.held) == ("PENDING", False)
    job.held = True  # a crash a moment after the release looks like this
    world.turns(3, 1.0)
    assert not job.held
    world.turns(40, 1.0)
    job.held = True
    world.turns(40, 1.0)
    assert job.held
    assert f"a user holds it: `scontrol release {job.job_id}`" in world.run.reason
    job.held, world.slurm.down = False, set()
    assert world.finish().state is RunState.SUCCEEDED


def test_one_run_s_trouble_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.ignore_references()
    run, _ = create_run(world.store, tmp_path, config_digest="missing", slug="bad", now=0.0, nonce="00000002")
    controller = Controller(world.store, {"slurm": world.slurm}, clock=world.clock.as_clock())
    report = controller.tick(world.lease)
    assert [error.split(":")[0] for error in report.errors] == ["bad-1"]
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
        patch.setattr(world.slurm, "find", lambda prefix, known: [broken])
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
    world.store.ignore_references()
    create_run(world.store, tmp_path, config_digest="damaged", slug="bad", now=0.0, nonce="00000002")
    read = world.store.config

    def config_of(digest: str) -> object:
        if digest == "damaged":
            raise RegistryError("config damaged is damaged")
        return read(digest)

    monkeypatch.setattr(world.store, "config", config_of)
    report = world.controller.tick(world.lease)
    assert [error.split(":")[0] for error in report.errors] == ["bad-1"]
    assert world.attempts[0].state is AttemptState.SUBMITTED


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


@pytest.mark.parametrize("attempts", [1, 2], ids=["before its next attempt", "with an attempt not submitted"])
def test_a_run_with_which_another_registry_goes_on_is_held(tmp_path: Path, attempts: int) -> None:
    (tmp_path / "runs").mkdir()
    with Store.open(tmp_path / "registry.db") as store:
        world = World(tmp_path / "runs", store=store)
        training(world, 12)
        store.add_user_request(world.name, "cancel", {}, now=1.0)
        world.turns(100, 1.0, lambda: world.run.state is RunState.CANCELLED)
        assert world.run.state is RunState.CANCELLED
        stamp: dict[str, Any] = {"epoch": world.lease.epoch, "now": world.clock.wall()}
        other = tmp_path / "other.db"
        record_newer_attempt(store, world.name, other)
        theirs = world.folder.attempt(2)
        theirs.make()
        token = LaunchToken(attempt=2, epoch=9, job_id="8", nonce="bbbbbbbb", config_digest="x", checkpoints=())
        token.write(theirs.go)
        if attempts == 2:
            store.add_attempt(world.name, nonce="aaaaaaaa", excluded=(), **stamp)
        before = sorted(world.folder.path.rglob("*"))
        store.add_user_request(world.name, "resume", {}, now=2.0)
        world.turns(5, 1.0)
        assert world.run.state is RunState.HELD
        assert f"another registry has continued {world.name}: {other} has attempt 2" in world.run.reason
        assert f"`orch db rebuild --root {world.root}` imports that" in world.run.reason
        assert (len(world.attempts), world.folder.attempt(2).go.exists()) == (attempts, True)
        assert sorted(world.folder.path.rglob("*")) == before
        assert RunRecord.read(world.folder.record).registry == str(other)
