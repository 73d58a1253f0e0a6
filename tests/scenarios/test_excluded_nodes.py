"""Stories of nodes that are excluded: by orch, or by a person, before a run begins or while it waits."""

from pathlib import Path

from orchestrator.registry.records import UNTIL_RELEASED
from orchestrator.states import RunState
from tests.fakes.model_slurm import SlurmFaults
from tests.scenarios.world import World, training
from trainer.protocol.failures.outcome import Failure, FailureKind


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
    world.controller.pool_size = lambda _: 4
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
    assert "n1 may not be used (`orch nodes ls`; `orch nodes release NODE` ends that)" in world.run.reason


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
