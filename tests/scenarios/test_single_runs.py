"""Stories of single runs: how attempts end, what follows, and what the registry says about it afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.nodes_to_avoid import load_pool
from orchestrator.recovery.classify_failure import LEAVING_LIMIT
from orchestrator.registry.records import Notice
from orchestrator.states import AttemptState, RunState, Trust
from tests.scenarios.world import World, config, moves, training
from trainer.protocol.config import load
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.requests import RequestKind, pending


def test_a_quiet_run_goes_from_intent_to_succeeded(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    assert moves(world) == ["CREATED", "QUEUED", "RUNNING", "SUCCEEDED"]
    assert moves(world, "attempt") == ["INTENT", "SUBMITTED", "RUNNING", "ENDED"]
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
    assert first.decision["reason"] == "continues after preempted"
    assert second.resumed_from == first.saved_step
    assert {item.trust for item in world.store.checkpoints(world.name) if item.step == second.resumed_from} == {
        Trust.RESTORED
    }
    assert moves(world) == ["CREATED", "QUEUED", "RUNNING", "RECOVERING", "QUEUED", "RUNNING", "SUCCEEDED"]


def test_a_config_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.folder.config.unlink()
    world.slurm.preempt(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    assert load(world.folder, 2).train.steps == 40


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


def test_a_drilled_node_loss_is_held_against_no_node_and_no_budget(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    job = world.slurm.running()[0]
    node = world.attempts[0].nodes[0]
    log = EventLog(world.folder.attempt(1).event_file("agent-0000"), "agent-0000", 1, clock=world.clock)
    log.generation = 1
    log.write(EventKind.DRILL, kind="kill-node", rank=None, node=node, step=12)
    world.slurm.fail_node(job, zombie=False)
    assert world.finish().state is RunState.SUCCEEDED
    first, second = world.attempts
    assert first.failure is not None
    assert (first.failure["kind"], first.failure["drill"]) == (FailureKind.NODE_LOST, "kill-node")
    assert first.decision is not None
    assert first.decision["reason"].startswith("continues after a drill, which uses no budget: ")
    assert second.excluded == ()
    assert {(one.failures, one.excluded_until) for one in world.store.nodes()} == {(0, 0.0)}


def test_a_node_that_slows_two_attempts_down_is_left_out_of_the_third(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.controller.actor.pool_size = lambda _: 4
    slow = ""
    for number, step in ((1, 12), (2, 22)):
        training(world, step)
        attempt = world.attempts[-1]
        assert attempt.number == number
        slow = slow or attempt.nodes[0]
        assert slow in attempt.nodes, "one preemption is no reason to leave it out"
        path = world.folder.attempt(number).event_file("coordinator")
        log = EventLog(path, "watch", number, clock=world.clock)
        log.generation = 1
        log.write(EventKind.STRAGGLER, rank=0, node=slow, section="forward", ratio=1.3, step=step, steps=10, over=False)
        world.slurm.preempt(world.slurm.running()[0])
        world.turns(200, until=lambda number=number: len(world.attempts) > number)
    assert world.finish().state is RunState.SUCCEEDED
    assert slow in world.attempts[2].excluded
    assert slow not in world.attempts[2].nodes
    (node,) = [node for node in world.store.nodes() if node.name == slow]
    assert (node.failures, node.reason) == (0, f"{slow} slowed down 2 attempts (recovery.exclude_slow_after)")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (EventKind.PREFLIGHT, {"node": 0, "ok": False}),
        (EventKind.SPARE_USED, {"node": 1, "instead": "HERE", "kind": "node_suspect"}),
    ],
)
def test_a_node_that_a_spare_replaced_is_avoided_by_the_next_attempt(
    tmp_path: Path, kind: EventKind, told: dict[str, object]
) -> None:
    world = World(tmp_path)
    world.controller.actor.pool_size = lambda _: 4
    training(world, 12)
    bad = world.attempts[0].nodes[0]
    log = EventLog(world.folder.attempt(1).event_file("coordinator"), "watch", 1, clock=world.clock)
    log.generation = 1
    failure = {"kind": "node_suspect", "reason": "its GPU is lost", "node": bad}
    log.write(EventKind.GENERATION_ENDED, reason="its GPU is lost", step=12, failure=failure)
    fields = {**told, "name": bad if kind is EventKind.PREFLIGHT else "another", "reason": "its GPU is lost"}
    log.write(kind, **{key: bad if value == "HERE" else value for key, value in fields.items()})
    world.slurm.preempt(world.slurm.running()[0])
    world.turns(200, until=lambda: len(world.attempts) > 1)
    assert world.attempts[1].excluded == (bad,)
    assert world.finish().state is RunState.SUCCEEDED


def test_what_a_node_was_kept_away_for_is_not_held_against_it_when_it_is_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    now, node, stamp = world.clock.now, world.attempts[0].nodes[0], {"epoch": world.lease.epoch}
    view = world.view
    for seq, kind in enumerate((EventKind.INCIDENT, EventKind.STRAGGLER)):
        notice = Notice(
            run=world.name, attempt=1, source="watch", seq=seq, kind=kind, generation=1, time=now, node=node
        )
        world.store.put_notice(notice, **stamp)

    world.clock.now = now + 100

    def known() -> tuple[int, int]:
        (standing,) = load_pool(world.controller.actor, view).known
        return standing.hangs, standing.slow

    assert known() == (1, 1)
    world.store.exclude_node(node, "slurm", now + 50, "", **stamp, now=now)
    assert known() == (0, 0)


def test_a_lost_job_needs_a_minute_of_answers_and_of_silence(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.forget(world.slurm.running()[0])
    gone = world.clock.now
    world.turns(200, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert world.clock.now - gone >= 60
    assert world.finish().state is RunState.SUCCEEDED


def test_a_run_says_why_its_job_waits_and_whether_that_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.turns(20, 1.0, lambda: bool(world.slurm.jobs))
    (job,) = world.slurm.jobs
    told = []
    for reason in ("Priority", "BadConstraints", "None"):
        job.shown = {"state": "PENDING", "reason": reason}
        world.turns(2)
        told.append(world.run.reason)
    assert told[0] == "job 1 is PENDING (Priority): jobs with higher priority go first"
    assert told[1].startswith("job 1 is PENDING (BadConstraints): no nodes have everything it requests (")
    assert f"this does not clear on its own; see `sinfo -Nel`; `orch cancel {world.name}`, then `orch" in told[1]
    assert told[2] == "job 1 is PENDING"


def test_a_lost_job_that_comes_back_is_ended_before_its_successor_begins(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    job = world.slurm.running()[0]
    world.slurm.hidden.add(job.job_id)
    world.slurm.cancel = lambda job_id: None  # type: ignore[method-assign]
    world.turns(200, 1.0, lambda: world.attempts[0].state is AttemptState.LOST)
    assert job.agents is not None
    job.agents.dead = True  # stuck: its fence alone would have ended it
    world.slurm.hidden.clear()
    world.turns(60, 1.0)
    assert len(world.attempts) == 1
    assert "waits until job 1 has left the queue" in world.run.reason
    del world.slurm.cancel
    assert world.finish().state is RunState.SUCCEEDED
    assert job.ended is not None
    assert world.attempts[1].intent_at >= job.ended


def test_a_user_s_bug_fails_the_run_at_once_and_can_be_resumed(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents.fail(Failure(kind=FailureKind.USER_ERROR, reason="ValueError: no"))
    assert world.finish().state is RunState.FAILED
    assert world.run.reason.startswith("the training code failed: ValueError: no")
    assert len(world.attempts) == 1


def test_a_program_that_gets_nowhere_fails(tmp_path: Path) -> None:
    world = World(tmp_path, data=config(every=30, max_failures=3))
    for _ in range(3):
        world.turns(400, 1.0, lambda: bool(world.slurm.running()) and world.slurm.running()[0].agents.training)
        world.slurm.running()[0].agents.fail(Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 died"))
        world.turns(12, 1.0)
    assert world.run.state is RunState.FAILED
    assert world.run.reason.startswith("rank killed 3 times without a new checkpoint: recovery.max_failures is spent")


def test_a_requeued_job_is_ended_and_followed_by_a_new_attempt(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.requeue(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    assert world.attempts[0].failure is not None
    assert "requeued job 1" in world.attempts[0].failure["reason"]


def test_a_job_that_slurm_forgot_to_have_started_is_ended_and_followed_by_a_new_attempt(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.turns(20, 1.0, lambda: world.attempts[0].state is AttemptState.RUNNING)
    world.slurm.crash()
    (job,) = world.slurm.jobs
    assert (job.state, job.held, job.restarts) == ("PENDING", True, 0)
    assert world.finish().state is RunState.SUCCEEDED
    assert world.attempts[0].failure is not None
    assert "requeued job 1" in world.attempts[0].failure["reason"]
    assert len(world.attempts) == 2


def test_a_job_stuck_in_completing_is_fenced_and_left_behind(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.end(world.slurm.running()[0], "PREEMPTED", wait=99999.0)
    world.turns(int(LEAVING_LIMIT) // 10 - 2, 10.0)
    assert len(world.attempts) == 1
    assert world.finish().state is RunState.SUCCEEDED


def test_the_deadline_is_told_once_and_again_when_somebody_moves_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    job = world.slurm.running()[0]
    assert job.started is not None
    first = job.started + 3600.0
    assert deadlines(world) == [first]
    job.limit += 1800.0
    world.turns(3, 5.0)
    assert deadlines(world) == [first, first + 1800.0]
    # Seconds from start to end go with it: the clock of a node may be hours off.
    assert [request.detail for request in pending(world.folder.requests, 1, set())] == ["3600", "5400"]


def deadlines(world: World) -> list[float | None]:
    asked = pending(world.folder.requests, 1, set())
    return [request.value for request in asked if request.kind is RequestKind.DEADLINE]


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


STEP_10 = "step-00000010"


def test_the_mark_of_a_failure_that_proves_to_be_the_programs_is_taken_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    log = EventLog(world.folder.attempt(1).event_file("coordinator"), "watch", 1, clock=world.clock)
    error = Failure(kind=FailureKind.EXCEPTION, reason="raised KeyError: x", exception="KeyError", message="x", step=12)
    for generation, restored in ((2, 10), (3, 10)):
        log.generation = generation
        log.write(EventKind.CHECKPOINT_RESTORED, step=restored, name="?", tier="memory")
        log.write(EventKind.GENERATION_ENDED, reason=error.reason, step=12, failure=error.to_json())
    log.write(EventKind.CHECKPOINT_SUSPECT, step=10, reason="KeyError twice soon after loading it")
    world.turns(3)
    log.generation = 4
    log.write(EventKind.CHECKPOINT_RESTORED, step=5, name="?", tier="memory")
    trusts = {item.step: item.trust for item in world.store.checkpoints(world.name)}
    assert trusts[10] is Trust.SUSPECT
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents.fail(replace(error, kind=FailureKind.USER_ERROR))
    assert world.finish().state is RunState.FAILED
    assert {item.trust for item in world.store.checkpoints(world.name)} == {Trust.COMMITTED}
    marks = [
        (item.before, item.after) for item in world.store.transitions(world.name) if item.subject.startswith(STEP_10)
    ]
    assert marks == [("", "COMMITTED"), ("COMMITTED", "SUSPECT"), ("SUSPECT", "COMMITTED")]
