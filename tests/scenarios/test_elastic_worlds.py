"""Stories of runs that train on fewer nodes while some are missing, and on all of them again."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator import failpoints
from orchestrator.errors import SlurmUnreachable
from orchestrator.registry.records import BY_PERSON
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.slurm.refusals import submit_error
from orchestrator.states import RunState
from tests.scenarios import test_traces
from tests.scenarios.trace import Trace
from tests.scenarios.world import World, config, training
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.launch_token import LaunchToken

PATIENCE = 120.0


def elastic(*, steps: int = 400, every: int = 5, spares: int = 0, **recovery: Any) -> dict[str, Any]:
    data = config(steps=steps, every=every, **{"patience": PATIENCE, **recovery})
    data["cluster"] |= {"nodes": 4, "min_nodes": 2, "spare_nodes": spares}
    data["train"] |= {"batch_size": 24}
    return data


def world_on_four(tmp_path: Path, **kwargs: Any) -> World:
    world = World(tmp_path, data=elastic(**kwargs))
    world.controller.actor.pool_size = lambda _: 4
    return world


def lose_a_node(world: World) -> None:
    (job,) = world.slurm.running()
    world.slurm.fail_node(job, zombie=False)


def asked(world: World) -> list[int]:
    """Nodes of every job that was submitted, in their order."""
    return [job.spec.resources.nodes for job in world.slurm.jobs]


def intents(world: World) -> list[str]:
    """Why every attempt was begun."""
    return [one.reason for one in world.store.transitions(world.name) if one.kind == "attempt" and not one.before]


def smaller(tmp_path: Path, **kwargs: Any) -> World:
    """A run that has lost one of its four nodes and trains on three."""
    world = world_on_four(tmp_path, **kwargs)
    training(world, 12)
    lose_a_node(world)
    until_smaller(world)
    return world


def until_smaller(world: World) -> None:
    """Go on until the third job trains, and the run says so."""
    world.turns(200, 2.0, lambda: len(world.slurm.jobs) == 3 and world.run.state is RunState.RUNNING)
    world.turns(2)


def test_after_patience_a_run_goes_on_with_the_nodes_there_are_and_grows_back(tmp_path: Path) -> None:
    world = smaller(tmp_path)
    assert asked(world) == [4, 4, 3]
    waited = world.attempts[1]
    assert waited.failure is not None
    assert (waited.failure["kind"], waited.started_at) == ("nodes_missing", None)
    assert waited.failure["reason"].startswith("1 node was missing for 2m")
    assert "on 3 of 4 nodes: 1 node was missing for 2m" in world.run.reason, "orch status says it"
    assert intents(world)[2].startswith("next attempt on 3 of 4 nodes: 1 node was missing for 2m")

    world.slurm.down.clear()
    world.slurm.preempt(world.slurm.running()[0])
    assert world.finish().state is RunState.SUCCEEDED
    assert asked(world) == [4, 4, 3, 4]
    assert intents(world)[3] == "next attempt on all 4 nodes again: Slurm has 4 nodes in service"
    assert [attempt.smaller_world is not None for attempt in world.attempts] == [False, False, True, False]


def test_its_attempt_has_a_config_of_its_own_and_the_run_keeps_its_own(tmp_path: Path) -> None:
    world = smaller(tmp_path)
    place, attempt = world.folder.attempt(3), world.attempts[2]
    own, base = json.loads(place.config.read_text()), json.loads(place.run_config.read_text())
    assert base == json.loads(world.folder.config.read_text()) == world.store.config(world.run.config_digest)
    assert (own["cluster"]["nodes"], base["cluster"]["nodes"]) == (3, 4)
    assert (own["train"]["batch_size"], own["train"]["micro_batch_size"]) == (24, 4)
    assert attempt.config_digest != attempt.base_digest == world.run.config_digest
    assert LaunchToken.read(place.go).config_digest == attempt.config_digest


def test_a_node_that_is_back_before_patience_is_over_makes_no_smaller_attempt(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    training(world, 12)
    lose_a_node(world)
    world.turns(20, 2.0)
    assert world.run.reason.endswith("after 2m00s of waiting, the next job requests fewer nodes")
    world.slurm.down.clear()
    assert world.finish().state is RunState.SUCCEEDED
    assert asked(world) == [4, 4]


def test_spare_nodes_are_given_up_before_nodes_that_train(tmp_path: Path) -> None:
    world = World(tmp_path, data=elastic(spares=1))
    world.slurm.nodes.append("n5")
    training(world, 12)
    lose_a_node(world)
    until_smaller(world)
    assert asked(world) == [5, 5, 4]
    assert "with 0 of 1 spare node: 1 node was missing" in world.run.reason


def test_jobs_of_other_people_are_waited_for_no_longer_than_for_nodes_that_are_down(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    other = world.slurm.add_foreign()
    other.nodes = ("n1",)
    until_smaller(world)
    assert [job.spec.resources.nodes for job in world.slurm.jobs if job is not other] == [4, 3]
    assert "4 nodes were not free for 2m" in world.run.reason


def test_where_no_smaller_job_could_start_either_the_run_waits_on(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    world.slurm.down = {"n1", "n2", "n3"}
    world.turns(100, 5.0)
    assert asked(world) == [4]
    world.slurm.down = {"n1", "n2"}
    training(world, 5)
    assert asked(world) == [4, 2]


def test_while_slurm_does_not_answer_no_wait_is_given_up(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    world.slurm.down = {"n1"}
    world.turns(5)
    world.slurm.reachable = False
    world.turns(100, 5.0)
    assert [attempt.state for attempt in world.attempts] == ["SUBMITTED"]
    world.slurm.reachable = True
    training(world, 5)
    assert asked(world) == [4, 3]


def test_sinfo_alone_without_an_answer_gives_up_no_wait_either(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    world.slurm.down = {"n1"}

    def silent(asked: Any, without: Any) -> int:
        raise SlurmUnreachable("sinfo failed")

    usable, world.controller.actor.usable_nodes = world.controller.actor.usable_nodes, silent
    world.turns(100, 5.0)
    assert [(job.spec.resources.nodes, job.live) for job in world.slurm.jobs] == [(4, True)]
    world.controller.actor.usable_nodes = usable
    training(world, 5)
    assert asked(world) == [4, 3]


def test_a_wait_that_was_given_up_uses_no_budget_and_no_pause(tmp_path: Path) -> None:
    world = World(tmp_path, data=elastic(max_failures=1, no_progress_hours=0.0, backoff=900.0))
    world.slurm.down = {"n1"}
    world.turns(200, 2.0, lambda: bool(world.slurm.running()))
    (gone, now) = world.attempts
    assert gone.decision is not None
    assert gone.decision["action"] == "RETRY"
    assert gone.decision["reason"].startswith("continues with fewer nodes: 1 node was missing for 2m")
    assert now.intent_at - (gone.ended_at or 0.0) < 10.0


def test_an_excluded_node_is_no_node_to_grow_back_to(tmp_path: Path) -> None:
    world = smaller(tmp_path)
    (gone,) = world.slurm.down
    world.slurm.down.clear()
    later = world.clock.now + 24 * 3600
    world.store.exclude_node(gone, "slurm", later, "its GPU is lost", epoch=world.lease.epoch, now=world.clock.now)
    (job,) = world.slurm.running()
    assert job.agents is not None
    job.agents.fail(Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 died of SIGKILL", rank=1))
    assert world.finish().state is RunState.SUCCEEDED
    assert asked(world) == [4, 4, 3, 3]
    assert intents(world)[3] == "next attempt on 3 of 4 nodes: 1 node is still missing"
    assert world.attempts[3].excluded == (gone,)


def exclude(world: World, *nodes: str) -> None:
    until = world.clock.now + 24 * 3600
    for node in nodes:
        world.store.exclude_node(node, "slurm", until, "node_lost", epoch=world.lease.epoch, now=world.clock.now)


@pytest.mark.parametrize(("least", "avoids"), [(3, False), (2, True)])
def test_what_orch_excludes_gives_way_before_the_fewest_nodes_are_missed(
    least: int, avoids: bool, tmp_path: Path
) -> None:
    data = elastic()
    data["cluster"]["min_nodes"] = least
    world = World(tmp_path, data=data)
    world.controller.actor.pool_size = lambda _: 4
    training(world, 12)
    (job,) = world.slurm.running()
    excluded = "n1" if job.nodes[0] != "n1" else "n2"
    exclude(world, excluded)
    lose_a_node(world)
    until_smaller(world)
    assert asked(world) == [4, 4, least]
    assert world.attempts[2].excluded == ((excluded,) if avoids else ())


def test_what_a_person_excludes_gives_way_to_nothing(tmp_path: Path) -> None:
    data = elastic()
    data["cluster"]["min_nodes"] = 3
    world = World(tmp_path, data=data)
    world.controller.actor.pool_size = lambda _: 4
    world.slurm.down = {"n4"}
    world.turns(3)
    world.store.exclude_node(
        "n3", "slurm", world.clock.now + 24 * 3600, BY_PERSON, epoch=world.lease.epoch, now=world.clock.now
    )
    world.turns(100, 5.0)
    assert asked(world) == [4]


def test_a_person_who_resumes_the_run_gets_all_its_nodes_again(tmp_path: Path) -> None:
    world = smaller(tmp_path)
    world.slurm.end(world.slurm.running()[0], "CANCELLED")
    world.turns(50, 2.0, lambda: world.run.state is RunState.HELD)
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(5)
    assert asked(world) == [4, 4, 3, 4]


@pytest.mark.parametrize("point", ["before_next_intent", "after_next_intent", "after_cancel", "after_attempt_ended"])
def test_a_controller_may_be_killed_at_any_point_of_it(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_on_four(tmp_path)
    monkeypatch.setattr(failpoints, "reach", world.reach)
    world.slurm.down = {"n1"}
    world.turns(5)
    kills = [point]
    world.kill_at = lambda reached: bool(kills) and reached == kills[0] and bool(kills.pop())
    training(world, 5)
    assert not kills
    assert asked(world) == [4, 3]


def test_nodes_that_are_gone_from_the_partition_for_good_are_done_without(tmp_path: Path) -> None:
    world = world_on_four(tmp_path, backoff=10.0, backoff_max=40.0)
    training(world, 12)
    (job,) = world.slurm.running()
    world.slurm.nodes.remove("n4")
    submit = world.slurm.submit

    def refusing(spec: JobSpec) -> str | None:
        if spec.resources.nodes > len(world.slurm.nodes):
            raise submit_error(
                "sbatch: error: Batch job submission failed: Requested node configuration is not available"
            )
        return submit(spec)

    world.slurm.submit = refusing
    world.slurm.fail_node(job, zombie=False)
    world.slurm.down.clear()
    world.turns(300, 2.0, lambda: bool(world.slurm.running()))
    world.turns(2)
    assert asked(world) == [4, 3]
    refused = [attempt.failure["kind"] for attempt in world.attempts[1:-1] if attempt.failure]
    assert set(refused) == {"submit_deferred"}
    assert "on 3 of 4 nodes: 1 node was missing for 2m" in world.run.reason
    assert "a job of this size is refused" in world.run.reason
    assert world.finish().state is RunState.SUCCEEDED


def test_a_successor_cancels_at_once_what_was_given_up_before(tmp_path: Path) -> None:
    world = world_on_four(tmp_path)
    world.slurm.down = {"n1"}

    def lost(job_id: str) -> None:
        raise SlurmUnreachable("scancel failed")

    world.slurm.cancel = lost
    world.turns(100, 2.0, lambda: "scancel failed" in world.run.reason)
    assert [job.live for job in world.slurm.jobs] == [True]
    del world.slurm.cancel
    world.start_controller()
    world.turns(5, 2.0)
    assert asked(world) == [4, 3]
    assert world.clock.now - world.attempts[0].intent_at < 2 * PATIENCE


class ElasticTrace(Trace):
    """Bad weather over a run that may be smaller: nodes come and go, too."""

    def __init__(self, root: Path, seed: int, monkeypatch: Any) -> None:
        super().__init__(root, seed, monkeypatch, partial(elastic, patience=30.0))

    def _fault(self) -> None:
        super()._fault()
        if self.rng.random() < 0.1:
            self.slurm.down = {*self.rng.sample(self.slurm.nodes, self.rng.randrange(min(4, len(self.slurm.nodes))))}
            self.told.append(f"down: {sorted(self.slurm.down)}")


def live(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One seed's life; how many of its attempts were smaller."""
    trace = test_traces.live(seed, monkeypatch, ElasticTrace)
    assert_sizes_are_sound(trace.world, f"seed {seed} after {trace.told}")
    return sum(attempt.smaller_world is not None for attempt in trace.world.attempts)


def assert_sizes_are_sound(world: World, words: str) -> None:
    """Every job had the nodes of its attempt's config, none fewer than `cluster.min_nodes`."""
    for job in world.slurm.jobs:
        if job.spec.comment.startswith(f"orch:{world.name}/"):
            attempt = world.store.attempt(world.name, job.spec.attempt)
            nodes = world.store.config(attempt.config_digest)["cluster"]["nodes"]
            assert 2 <= job.spec.resources.nodes == nodes <= 4, words
    full = world.store.config(world.run.config_digest)["cluster"]["nodes"]
    assert full == 4, words


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_nodes_that_come_and_go(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller_attempts = [live(seed, monkeypatch) for seed in range(block * 8, block * 8 + 8)]
    assert len([count for count in smaller_attempts if count]) >= 2, "traces that are never smaller prove nothing"


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_two_thousand_seeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller_attempts = [live(seed, monkeypatch) for seed in range(1000 + block * 100, 1000 + block * 100 + 100)]
    assert len([count for count in smaller_attempts if count]) >= 10, "traces that are never smaller prove nothing"
