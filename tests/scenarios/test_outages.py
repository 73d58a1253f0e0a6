"""Stories of outages: a run waits for what heals, says for what, and needs no person."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from orchestrator.states import ENDED_RUNS, AttemptState, RunState
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.fakes.model_agents import ModelAgents
from tests.fakes.outages import PASSING_REFUSALS
from tests.scenarios.clusters import A, B, Clusters
from tests.scenarios.world import World, config, moves, training
from trainer.protocol.failures.outcome import Failure, FailureKind

HOUR = 3600.0
MEMORY = Path("/dev/shm")


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for many small files: in memory where there is such a place."""
    with TemporaryDirectory(prefix="orch-outage-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def wait_out(world: World, seconds: float = 2.0) -> None:
    """Go on, with backoff passing at once, until the run needs nobody any more."""
    for _ in range(5000):
        if world.run.state in ENDED_RUNS | {RunState.HELD}:
            return
        world.turns(1, seconds)
        world.sleep()
    raise AssertionError(f"still {world.run.state}: {world.run.reason}")


def test_node_failures_with_checkpoints_between_them_end_no_run(root: Path) -> None:
    world = World(root, data=config(steps=200, every=5))
    for number in range(1, 16):
        training(world, 10 * number)
        world.slurm.fail_node(world.slurm.running()[0], zombie=False)
        world.slurm.down.clear()
        world.turns(10)
    wait_out(world)
    assert world.run.state is RunState.SUCCEEDED
    assert len(world.attempts) == 16


@pytest.mark.parametrize("lasts", [90.0, 12 * HOUR])
def test_boots_that_fail_for_a_while(root: Path, lasts: float) -> None:
    world = World(root)
    world.slurm.outages.boots_fail_until = world.clock.now + lasts
    world.turns(10)
    assert world.run.state is RunState.RECOVERING
    assert "launch failed" in world.run.reason
    assert "; holds after 1970-01-13 13:46:" in world.run.reason
    assert "unless a checkpoint is saved; next try at 1970-01-12 13:4" in world.run.reason
    wait_out(world)
    assert world.run.state is RunState.SUCCEEDED


def test_boots_that_fail_for_longer_than_the_patience_hold_the_run(root: Path) -> None:
    world = World(root, data=config(no_progress_hours=3.0))
    began = world.clock.now
    world.slurm.outages.boots_fail_until = began + 100 * HOUR
    wait_out(world)
    assert world.run.state is RunState.HELD
    assert 3 * HOUR <= world.clock.now - began <= 3.5 * HOUR
    assert "in 3." in world.run.reason
    assert "recovery.no_progress_hours is spent; the last one: Slurm ended job" in world.run.reason


def test_preemptions_before_the_first_save(root: Path) -> None:
    world = World(root, data=config(steps=400, every=200))
    world.slurm.outages.preempted_until = world.clock.now + 3 * HOUR
    wait_out(world, 10.0)
    assert world.run.state is RunState.SUCCEEDED
    assert len(world.attempts) > 20


@pytest.mark.parametrize(
    ("words", "hours"), [(words, 1.0 if place else 8.0) for place, words in enumerate(PASSING_REFUSALS)]
)
def test_a_refusal_that_passes(root: Path, words: str, hours: float) -> None:
    world = World(root)
    world.slurm.outages.words = words
    world.slurm.outages.refused_until = world.clock.now + hours * HOUR
    wait_out(world, 20.0)
    assert world.run.state is RunState.SUCCEEDED
    assert len(world.attempts) <= 60


def test_a_reason_does_not_change_while_the_run_waits(root: Path) -> None:
    world = World(root)
    world.slurm.outages.refused_until = world.clock.now + HOUR
    world.turns(60, until=lambda: len(world.attempts) == 4 and world.run.state is RunState.RECOVERING)
    said = set()
    for _ in range(10):
        world.turns(1, 0.5)
        said.add(world.run.reason)
    assert len(said) == 1
    assert said.pop().startswith("submit deferred 4 times in 5")
    world.slurm.reachable = False
    world.turns(180, 0.5, until=lambda: "does not answer" in world.run.reason)  # Slurm is asked rarely
    assert "does not answer" in world.run.reason
    world.slurm.reachable = True
    world.turns(180, 0.5, until=lambda: "submit deferred" in world.run.reason)
    assert "submit deferred" in world.run.reason


def test_a_node_that_is_gone_is_no_longer_excluded(root: Path) -> None:
    world = World(root)
    training(world, 12)
    dead = world.attempts[0].nodes[0]
    world.controller.actor.pool_size = lambda _: 4
    agents = world.slurm.running()[0].agents
    assert agents is not None
    agents.fail(Failure(kind=FailureKind.NODE_SUSPECT, reason="its GPU is lost", node=dead))
    world.slurm.decommission(dead)
    wait_out(world)
    assert world.run.state is RunState.SUCCEEDED
    assert [attempt.excluded for attempt in world.attempts] == [(), (dead,), ()]
    (node,) = [node for node in world.store.nodes() if node.name == dead]
    assert (node.excluded_until <= world.clock.now, node.reason) == (True, "Slurm no longer knows this node")


def test_a_node_that_the_user_excludes_and_slurm_does_not_know_is_the_user_s(root: Path) -> None:
    data = config()
    data["cluster"]["exclude"] = "n9"
    world = World(root, data=data)
    world.slurm.outages.decommissioned.add("n9")
    world.turns(2)
    assert world.run.state is RunState.HELD
    assert len(world.attempts) == 1


def test_a_folder_of_runs_that_is_away_for_a_while(root: Path) -> None:
    world = World(root / "unmounted")
    world.turns(5)
    assert world.run.state is RunState.CREATED
    assert "cannot create the run's folder: No such file or directory" in world.run.reason
    assert world.run.reason.endswith("; retrying until it works")
    (root / "unmounted").mkdir()
    wait_out(world)
    assert world.run.state is RunState.SUCCEEDED


def test_a_doubtful_refusal_is_a_typo_in_a_new_run_and_an_outage_later(root: Path) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    for name in ("new", "old"):
        (root / name).mkdir()
    new = World(root / "new")
    new.slurm.outages.words, new.slurm.outages.refused_until = words, new.clock.now + HOUR
    new.turns(2)
    assert new.run.state is RunState.HELD
    assert "sacctmgr show assoc" in new.run.reason
    old = World(root / "old")
    training(old, 12)
    old.slurm.outages.words, old.slurm.outages.refused_until = words, old.clock.now + HOUR
    old.slurm.preempt(old.slurm.running()[0])
    wait_out(old)
    assert old.run.state is RunState.SUCCEEDED


def test_storage_that_heals(root: Path) -> None:
    world = World(root)
    for step in (12, 12, 12):
        training(world, step)
        agents = world.slurm.running()[0].agents
        assert agents is not None
        agents.fail(Failure(kind=FailureKind.STORAGE, reason="OSError: [Errno 28] No space left on device"))
        world.turns(3)
        world.turns(60, until=lambda: any(job.agents and job.agents.training for job in world.slurm.running()))
    wait_out(world)
    assert world.run.state is RunState.SUCCEEDED


def test_a_released_node_is_used_again(root: Path) -> None:
    world = World(root)
    training(world, 12)
    node, stamp = world.attempts[0].nodes[0], {"epoch": world.lease.epoch, "now": world.clock.now}
    for _ in range(2):
        world.store.add_user_request(world.name, "release", {"node": node}, world.clock.now)
        world.tick()
        world.store.exclude_node(node, "slurm", world.clock.now + HOUR, "", **stamp)
    first, second = world.store.user_requests(pending=False)
    assert (first.answer, second.answer) == (f"{node} is not excluded", f"{node} may be used again")


def test_a_node_of_a_known_cluster_is_released_and_its_failures_count_no_more(root: Path) -> None:
    two = Clusters(root)
    name = two.submit(A, steps=4000)
    two.turns(2)
    assert two.a.lease is not None
    stamp = {"epoch": two.a.lease.epoch, "now": two.clock.now}
    for cluster in (A, B):
        two.store.saw_node("n9", cluster, **stamp, failure="it hung")
        two.store.exclude_node("n9", cluster, two.clock.now + HOUR, "it hung", **stamp)
    two.store.add_user_request(name, "release", {"node": "n9"}, two.clock.now)
    two.turns(2)
    (ask,) = two.store.user_requests(pending=False)
    assert ask.answer == "n9 may be used again"
    known = {node.cluster: node for node in two.store.nodes() if node.name == "n9"}
    assert (known[A].failures, known[B].failures) == (0, 1)
    assert known[A].excluded_until <= two.clock.now < known[B].excluded_until
    two.close()


def test_a_failed_attempt_that_waits_is_over(root: Path) -> None:
    world = World(root)
    world.slurm.outages.refused_until = world.clock.now + 600.0
    world.turns(2)
    assert world.attempts[0].state is AttemptState.ENDED
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(2)
    assert world.run.state is RunState.CANCELLED


MIB = 1 << 20
FAILING = "saves failing since step 10: disk full (/r/checkpoints)"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", "4m") as folder:
        yield folder


def agents_of(world: World) -> ModelAgents:
    agents = world.slurm.running()[0].agents
    assert agents is not None
    return agents


def end_for_want_of_room(world: World, room: int = 3 * MIB) -> None:
    """The attempt ends as one does that could not save; the disk is full by the time anybody looks."""
    agents_of(world).fail(Failure(kind=FailureKind.STORAGE, reason="disk full", room=room))


def test_saves_that_fail_are_the_reason_until_they_work_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    agents_of(world).saves_failing = FAILING
    world.turns(2, 1.0)
    assert world.run.reason.startswith(f"{FAILING}; job ")
    agents_of(world).saves_failing = ""
    world.turns(2, 1.0)
    assert world.run.reason.startswith("job ")
    assert world.finish().state is RunState.SUCCEEDED


def test_an_attempt_ends_as_storage_and_the_next_one_waits_for_room(disk: Path) -> None:
    world = World(disk)
    training(world, 12)
    end_for_want_of_room(world)
    filler = fill(disk)
    world.turns(60, until=lambda: world.run.state is RunState.RECOVERING)
    assert (world.attempts[0].failure or {})["kind"] == FailureKind.STORAGE
    jobs = len(world.slurm.jobs)
    world.turns(50, 10.0)
    assert world.run.reason == (
        "storage: waits for disk space in the run's folder: disk full: 0.0 MiB are free; a checkpoint needs 3.0 MiB "
        f"({world.folder.path})"
    )
    # Room for small files is not enough: it would train for nothing.
    filler.write_bytes(bytes(2 * MIB))
    world.turns(5)
    assert (len(world.attempts), len(world.slurm.jobs)) == (1, jobs)
    filler.unlink()
    assert world.finish().state is RunState.SUCCEEDED
    assert len(world.attempts) == 2


def test_a_run_that_has_waited_for_a_day_needs_a_person(disk: Path) -> None:
    world = World(disk, data=config(no_progress_hours=2.0))
    training(world, 12)
    end_for_want_of_room(world)
    filler = fill(disk)
    assert world.finish(2000, 60.0).state is RunState.HELD
    assert world.run.reason.startswith("storage: disk full: 0.0 MiB are free")
    assert "for 2 h: recovery.no_progress_hours is spent" in world.run.reason
    assert len(world.attempts) == 1
    # Who resumes it has the same time again to make room.
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(3)
    assert world.run.state is RunState.RECOVERING
    filler.unlink()
    assert world.finish().state is RunState.SUCCEEDED
    assert moves(world).count(RunState.HELD) == 1


def test_a_first_job_waits_for_room(disk: Path) -> None:
    world = World(disk)
    filler = fill(disk)
    world.turns(3)
    assert world.run.state is RunState.CREATED
    assert "No space left on device" in world.run.reason or "disk full" in world.run.reason
    assert world.slurm.jobs == []
    filler.unlink()
    world.turns(2)
    assert world.run.state in (RunState.QUEUED, RunState.RUNNING)


def test_a_run_is_cancelled_although_no_request_can_be_written(disk: Path) -> None:
    world = World(disk)
    training(world, 12)
    agents_of(world)._beat = lambda: None  # type: ignore[method-assign]
    agents_of(world)._train = lambda seconds: None  # type: ignore[method-assign]
    fill(disk)
    world.store.add_user_request(world.name, "cancel", {}, world.clock.now)
    world.turns(20, 1.0, lambda: world.run.state is RunState.CANCELLED)
    assert world.run.state is RunState.CANCELLED
