"""Stories of jobs that are handed in: no answer, a wrong one, a refusal, somebody else's job."""

from pathlib import Path

import pytest

from orchestrator.controller.actor import AMBIGUOUS_FOR
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import UNTIL_RELEASED
from orchestrator.states import AttemptState, RunState
from tests.fakes.model_slurm import SlurmFaults
from tests.scenarios.world import World, training
from trainer.protocol.failures.outcome import Failure, FailureKind


def test_an_ambiguous_submit_is_looked_up_and_never_repeated_blindly(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0)
    world.turns(3, 1.0)
    assert [call for call in world.slurm.calls if call.startswith("submit")] == [f"submit {world.attempts[0].job_name}"]
    assert world.attempts[0].job_id == "1"


def test_a_submit_that_vanished_is_repeated_after_a_minute_of_answers(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, lost=1.0)
    world.tick()
    begun = world.clock.now
    world.slurm.slurm_faults = SlurmFaults()
    world.turns(200, 1.0, lambda: world.attempts[0].job_id is not None)
    assert AMBIGUOUS_FOR <= world.clock.now - begun <= AMBIGUOUS_FOR + 5
    assert len([call for call in world.slurm.calls if call.startswith("submit")]) == 2
    assert len(world.attempts) == 1


def test_silence_in_between_begins_the_minute_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, lost=1.0)
    world.turns(40, 1.0)
    world.slurm.reachable = False
    world.turns(3, 1.0)
    world.slurm.reachable, silent = True, world.clock.now
    world.slurm.slurm_faults = SlurmFaults()
    world.turns(200, 1.0, lambda: world.attempts[0].job_id is not None)
    assert world.clock.now - silent >= AMBIGUOUS_FOR


def test_one_lost_job_among_failures_of_sbatch_needs_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(accounting=False)
    find = world.slurm.find
    world.slurm.find = lambda *_: []  # type: ignore[method-assign]
    world.tick()
    (job,) = world.slurm.jobs
    world.slurm.jobs.remove(job)
    world.slurm.find = find  # type: ignore[method-assign]
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, lost=1.0, accounting=False)
    world.turns(3000, 1.0, lambda: len(world.store.submissions(world.name)) == 3)
    world.turns(200, 1.0, lambda: len(world.attempts) == 2)
    assert world.attempts[0].failure["kind"] == "job_lost"
    world.slurm.slurm_faults = SlurmFaults()
    assert world.finish().state is RunState.SUCCEEDED


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
    world.slurm.slurm_faults = SlurmFaults(reject="Invalid account or account/partition combination specified")
    assert world.finish().state is RunState.HELD
    assert "Invalid account" in world.run.reason
    assert f"orch resume {world.name}" in world.run.reason
    world.slurm.slurm_faults = SlurmFaults()
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
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


def test_a_reused_id_is_not_taken_for_the_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    world.slurm.jobs.clear()
    world.clock.advance(2.0)  # as long as a slurmctld takes at least to come back
    world.slurm._next_id = 1
    stranger = world.slurm.add_foreign("somebody-else", "x", state="PENDING")
    stranger.held = True
    assert stranger.job_id == world.attempts[0].job_id
    world.turns(100, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert world.attempts[0].state is AttemptState.LOST
    assert world.slurm.jobs[0].state == "PENDING"


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


def test_a_folder_of_another_registry_holds_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.folder.make()
    assert world.finish().state is RunState.HELD
    assert "belongs to another run" in world.run.reason
    assert world.slurm.jobs == []


def exclude(world: World, node: str, until: float, reason: str = "node_lost in other-1/1") -> None:
    world.store.exclude_node(node, "slurm", until, reason, epoch=world.lease.epoch, now=world.clock.now)


def ask(world: World, verb: str, node: str, until: float = UNTIL_RELEASED) -> str:
    """What the controller answers to a person."""
    args = {"node": node} if verb == "release" else {"node": node, "until": until, "why": "ada@login1: it is hot"}
    number = world.store.add_user_request(world.name, verb, args, world.clock.now)
    world.tick()
    return next(one.answer for one in world.store.user_requests(pending=False) if one.id == number)


def roomy(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.controller.actor.pool_size = lambda _: 4
    return world


def test_the_first_attempt_of_a_new_run_avoids_what_another_run_was_hurt_by(tmp_path: Path) -> None:
    world = roomy(tmp_path)
    exclude(world, "n1", world.clock.now + 23 * 3600)
    exclude(world, "n3", world.clock.now - 1)
    training(world, 5)
    assert world.attempts[0].excluded == ("n1",)
    (job,) = world.slurm.jobs
    assert job.spec.resources.exclude == job.spec.resources.avoided == ("n1",)
    assert "n1" not in world.attempts[0].nodes


def test_what_is_excluded_while_an_attempt_waits_for_slurm_holds_for_it(tmp_path: Path) -> None:
    world = roomy(tmp_path)
    world.slurm.reachable = False
    world.turns(3)
    assert world.attempts[0].submitted_at is None
    exclude(world, "n2", world.clock.now + 3600)
    world.slurm.reachable = True
    training(world, 5)
    assert world.attempts[0].excluded == ("n2",)


def test_a_persons_word_holds_for_more_nodes_than_orch_may_exclude(tmp_path: Path) -> None:
    world = roomy(tmp_path)
    world.slurm.reachable = False  # until both are told, nothing is submitted
    world.tick()
    assert ask(world, "exclude", "n1") == "n1 is excluded until it is released"
    assert ask(world, "exclude", "n2", world.clock.now + 3600).startswith("n2 is excluded until 1970-01-12 ")
    world.slurm.reachable = True
    training(world, 5)
    assert world.attempts[0].excluded == ("n1", "n2")
    assert [node.reason for node in world.store.nodes() if node.excluded_until > world.clock.now] == [
        "excluded by ada@login1: it is hot"
    ] * 2


def test_a_failure_does_not_shorten_what_a_person_ordered(tmp_path: Path) -> None:
    world = roomy(tmp_path)
    training(world, 12)
    node = world.attempts[0].nodes[0]
    ask(world, "exclude", node)
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents.fail(Failure(kind=FailureKind.NODE_SUSPECT, reason="its GPU is lost", node=node))
    assert world.finish().state is RunState.SUCCEEDED
    (known,) = [one for one in world.store.nodes() if one.name == node]
    assert (known.excluded_until, known.reason) == (UNTIL_RELEASED, "excluded by ada@login1: it is hot")
    assert (world.attempts[1].excluded, known.failures) == ((node,), 1)
    assert ask(world, "release", node) == f"{node} may be used again"


def test_a_job_that_is_refused_says_which_nodes_it_was_to_avoid(tmp_path: Path) -> None:
    world = roomy(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(reject="Requested node configuration is not available")
    ask(world, "exclude", "n1")
    world.turns(400, 5.0, lambda: world.run.state is RunState.HELD)
    assert "n1 excluded (see `orch nodes ls`; readmit with `orch nodes release NODE`)" in world.run.reason


def waiting(tmp_path: Path) -> World:
    """A run whose released job waits for nodes."""
    world = roomy(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(5)
    assert [(job.state, job.held) for job in world.slurm.jobs] == [("PENDING", False)]
    return world


def test_a_job_that_waits_already_is_kept_off_what_is_excluded_meanwhile(tmp_path: Path) -> None:
    world = waiting(tmp_path)
    ask(world, "exclude", "n1")
    ask(world, "exclude", "n2")
    assert world.slurm.jobs[0].spec.resources.exclude == world.attempts[0].excluded == ("n1", "n2")
    ask(world, "release", "n2")
    assert world.slurm.jobs[0].spec.resources.exclude == world.attempts[0].excluded == ("n1",)
    world.slurm.down = set()
    training(world, 5)
    assert "n1" not in world.attempts[0].nodes
    calls = len(world.slurm.calls)
    ask(world, "exclude", "n3")  # it runs: nothing is done to it any more
    world.turns(2, 1.0)
    assert not [call for call in world.slurm.calls[calls:] if call.startswith("release")]


def test_a_site_that_lets_nobody_change_a_job_is_asked_once(tmp_path: Path) -> None:
    world = waiting(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(fixed=True)
    ask(world, "exclude", "n1")
    world.turns(5, 1.0)
    assert len([call for call in world.slurm.calls if call.startswith("release")]) == 2, "to start it, and to change it"
    assert world.attempts[0].excluded == ()
    world.slurm.slurm_faults, world.slurm.down = SlurmFaults(), set()
    assert world.finish().state is RunState.SUCCEEDED
