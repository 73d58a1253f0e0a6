"""One home, two clusters: each has its own controller, and none judges what it cannot know."""

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest

from orchestrator.registry.records import Attempt, Run
from orchestrator.states import ENDED_RUNS, AttemptState, RunState
from tests.fakes.model_slurm import MIN_JOB_AGE
from tests.scenarios.clusters import A, B, Clusters
from tests.scenarios.test_traces import MEMORY


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Clusters]:
    made = Clusters(tmp_path)
    yield made
    made.close()


def test_each_cluster_s_controller_serves_its_own_runs(two: Clusters) -> None:
    mine, theirs = two.submit(A), two.submit(B)
    two.turns(60)
    assert [two.run(name).state for name in (mine, theirs)] == [RunState.SUCCEEDED] * 2
    assert [attempt.scheduler for name in (mine, theirs) for attempt in two.store.attempts(name)] == [A, B]
    assert {lease.scheduler for lease in two.store.leases() if lease.holder} == {A, B}


@pytest.mark.parametrize("visible", [True, False])
def test_a_queued_run_is_left_alone_by_the_other_cluster(two: Clusters, visible: bool) -> None:
    name = two.submit(A)
    two.a.slurm.down |= set(two.a.slurm.nodes)
    two.turns(3)
    two.a.up = False
    if not visible:
        os.rename(two.folder(name).path, two.root / "elsewhere")
    two.turns(200, 10.0)
    (attempt,) = two.store.attempts(name)
    assert (attempt.state, two.b.slurm.jobs) == (AttemptState.SUBMITTED, [])
    assert two.folder(name).path.exists() is visible


def test_a_folder_that_is_not_visible_is_never_made_again(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    place = two.folder(name).path
    os.rename(place, two.root / "elsewhere")
    two.a.slurm.forget(two.a.slurm.running()[0])
    for turn in range(100):
        two.a.tick()
        two.clock.advance(10.0)
        if turn == 50:
            place.mkdir()  # the mount point of a file system that is not there yet
    assert two.run(name).reason.startswith("the run directory is not visible on ")
    assert str(place) in two.run(name).reason
    assert not list(place.iterdir())
    assert [attempt.state for attempt in two.store.attempts(name)] == [AttemptState.RUNNING]
    place.rmdir()
    os.rename(two.root / "elsewhere", place)
    two.a.tick()
    assert len(two.store.attempts(name)) == 1, "silence is measured anew"
    two.turns(200)
    assert len(two.store.attempts(name)) == 2


def test_another_run_s_folder_at_the_place_is_not_touched(two: Clusters) -> None:
    first, second = two.submit(A, steps=4000), two.submit(A, steps=4000)
    two.turns(10)
    place, other = two.folder(first).path, two.folder(second).path
    os.rename(place, two.root / "elsewhere")
    shutil.copytree(other, place)
    two.a.slurm.forget(next(job for job in two.a.slurm.running() if f"/{first}/" in f"{job.spec.run_dir}/"))
    for _ in range(30):
        two.a.tick()
        two.clock.advance(10.0)
    assert "is another run's" in two.run(first).reason
    assert (place / "attempts" / "001" / "GO").exists()
    assert len(two.store.attempts(first)) == 1


def test_a_run_whose_folder_is_gone_for_good_can_be_cancelled(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    shutil.rmtree(two.folder(name).path)
    two.a.slurm.agents_of[name][0].dead = True
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    two.turns(60)
    assert two.run(name).state is RunState.CANCELLED
    assert not two.live(name)
    assert not two.store.user_requests()


def test_a_controller_whose_commands_reach_another_slurm_stops_and_gives_back(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.b.up = False
    calls = len(two.b.slurm.calls)
    two.a.reaches = B
    two.a.tick()
    assert {lease.scheduler: bool(lease.holder) for lease in two.store.leases()}[A] is False
    assert len(two.b.slurm.calls) == calls
    for _ in range(100):
        two.a.tick()
        two.clock.advance(10.0)
    assert [attempt.state for attempt in two.store.attempts(name)] == [AttemptState.RUNNING]
    two.a.reaches = A
    two.turns(5)
    assert {lease.scheduler: bool(lease.holder) for lease in two.store.leases()}[A] is True


def test_a_configuration_that_changes_within_a_pass_submits_nothing(
    two: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = two.submit(A)
    two.b.up = False
    find = two.a.slurm.find

    def change(prefix: str, known: Collection[str] = ()) -> object:
        two.a.reaches = B
        return find(prefix, known)

    monkeypatch.setattr(two.a.slurm, "find", change)
    two.a.tick()
    assert two.store.attempts(name)[0].submitted_at is None
    assert not [call for call in two.a.slurm.calls + two.b.slurm.calls if call.startswith("submit")]


def test_silence_is_never_another_cluster(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.a.slurm.reachable = False
    two.turns(60, 10.0)
    assert "nothing is assumed" in two.run(name).reason
    assert {lease.scheduler for lease in two.store.leases()} == {A, B}
    # A controller that is started now does not know whose it is, and touches nothing.
    two.a.start()
    two.clock.advance(100.0)
    two.turns(20, 10.0)
    assert [attempt.state for attempt in two.store.attempts(name)] == [AttemptState.RUNNING]
    two.a.slurm.reachable = True
    two.turns(3)
    assert two.run(name).reason.startswith("job 1 is RUNNING")


def test_a_run_of_unknown_cluster_goes_to_the_one_that_has_its_job(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.store.change(Run, {"scheduler": ""}, name=name)
    two.a.up = False
    two.turns(40, 5.0)
    assert two.run(name).scheduler == ""
    assert f"orch resume {name} --here" in two.run(name).reason
    two.a.up = True
    two.turns(40)
    assert two.run(name).scheduler == A


def test_a_run_that_was_never_submitted_is_taken_on_once(two: Clusters) -> None:
    name = two.submit("")
    two.turns(5)
    owner = two.run(name).scheduler
    assert owner in (A, B)
    assert [site.name for site in two.sites if site.slurm.jobs] == [owner]


def test_what_was_submitted_in_silence_waits_for_its_own_login_node(two: Clusters) -> None:
    name = two.submit("", host="another-login-node")
    two.turns(20)
    assert (two.run(name).scheduler, two.a.slurm.jobs + two.b.slurm.jobs) == ("", [])
    assert "submitted on another-login-node" in two.run(name).reason
    two.store.add_user_request(name, "resume", {"here": B}, two.clock.now)
    two.turns(20)
    assert two.run(name).scheduler == B


def test_what_no_scheduler_was_ever_given_is_cancelled_in_silence(two: Clusters) -> None:
    two.a.slurm.reachable = two.b.slurm.reachable = False
    name = two.submit("")
    two.turns(3)
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    two.turns(2)
    assert (two.run(name).state, two.store.user_requests()) == (RunState.CANCELLED, [])
    two.a.slurm.reachable = two.b.slurm.reachable = True
    two.turns(40)
    assert (two.run(name).state, two.a.slurm.jobs + two.b.slurm.jobs) == (RunState.CANCELLED, [])


def test_what_may_have_a_job_is_not_cancelled_in_silence(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.a.slurm.reachable = False
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    two.turns(10)
    assert (two.run(name).state, len(two.store.user_requests())) == (RunState.RUNNING, 1)


def test_a_run_that_is_cancelled_in_silence_is_not_launched_by_who_saw_it_alive(
    two: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = two.submit("")
    two.b.slurm.reachable = False
    two.b.tick()
    find = two.a.slurm.find

    def cancelled_meanwhile(*words: Any) -> Any:
        if not two.store.user_requests() and two.run(name).state is RunState.CREATED:
            two.store.add_user_request(name, "cancel", {}, two.clock.now)
            two.b.tick()
            assert two.run(name).state is RunState.CANCELLED
        return find(*words)

    monkeypatch.setattr(two.a.slurm, "find", cancelled_meanwhile)
    two.turns(20)
    assert (two.run(name).state, two.run(name).scheduler) == (RunState.CANCELLED, "")
    assert two.a.slurm.jobs == []


def test_a_request_is_answered_by_the_run_s_own_controller(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.a.up = False
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    two.turns(20)
    assert len(two.store.user_requests()) == 1
    two.a.up = True
    two.turns(20)
    assert two.run(name).state is RunState.CANCELLED


def test_a_person_takes_an_ended_run_over_but_never_a_live_one(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(10)
    two.store.add_user_request(name, "resume", {"here": B}, two.clock.now)
    two.b.tick()
    assert two.run(name).scheduler == A
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    two.turns(20)
    assert two.run(name).state is RunState.CANCELLED
    two.a.up = False
    two.store.add_user_request(name, "resume", {"here": B}, two.clock.now)
    two.turns(20)
    assert two.run(name).scheduler == B
    assert [attempt.scheduler for attempt in two.store.attempts(name)] == [A, B]
    assert [where for where, _ in two.live(name)] == [B]


def trouble(two: Clusters, rng: Random) -> None:
    """Something happens at one of the sites."""
    site = rng.choice(two.sites)
    job = rng.choice(site.slurm.running() or [None])
    what = rng.choice(
        ["silence", "answer", "answer", "away", "back", "back", "restart", "switch", "switch_back", "hide"]
    )
    if what in ("silence", "answer"):
        site.slurm.reachable = what == "answer"
    elif what in ("away", "back"):
        site.up = what == "back"
    elif what == "restart" and site.lease is not None:
        two.store.drop_lease(site.lease)
        site.start()
    elif what in ("switch", "switch_back"):
        site.reaches = rng.choice((A, B)) if what == "switch" else site.name
    elif what == "hide":
        flip_folder(two, rng.choice(two.runs))
    if job is not None and rng.random() < 0.3:
        rng.choice([site.slurm.preempt, site.slurm.requeue, site.slurm.forget])(job)
    if rng.random() < 0.05:
        site.slurm.crash()


def flip_folder(two: Clusters, name: str) -> None:
    """The file system with the run's folder goes, or comes back."""
    place = two.folder(name).path
    away = two.root / f"away-{name}"
    source, target = (away, place) if away.exists() else (place, away)
    if source.exists() and not target.exists():
        os.rename(source, target)


def live_through(root: Path, seed: int) -> None:
    """Bad days for two clusters, then healing, and an end for every run."""
    rng, two = Random(seed), Clusters(root, seed)
    for _ in range(rng.choice([1, 2])):
        two.submit(A, steps=rng.choice([20, 60]))
        two.submit(rng.choice([B, ""]), steps=rng.choice([20, 60]))
    try:
        for _ in range(50):
            if rng.random() < 0.3:
                trouble(two, rng)
            two.turns(1, rng.choice([1.0, 7.0, 30.0]))
        heal(two)
        over = ENDED_RUNS | {RunState.HELD}
        for _ in range(60):
            if all(two.run(name).state in over for name in two.runs):
                break
            two.turns(10, 5.0)
        for name in two.runs:
            assert two.run(name).state in over, (name, two.run(name))
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        two.close()


def heal(two: Clusters) -> None:
    for name in two.runs:
        if (two.root / f"away-{name}").exists():
            flip_folder(two, name)
    for site in two.sites:
        site.slurm.reachable, site.up, site.reaches = True, True, site.name


def trace(seed: int) -> None:
    root = Path(mkdtemp(prefix="orch-two-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        live_through(root, seed)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.proof) for block in (2, 3))])
def test_forty_seeds(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        trace(seed)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_two_thousand_seeds() -> None:
    for seed in range(100, 2100):
        trace(seed)


MOVED, RENAMED = "lab@login2:6817/cccccccc", "campus@login2:6817/cccccccc"


def move(two: Clusters, name: str) -> None:
    """The Slurm of A answers by another name from now on."""
    two.a.slurms[name] = two.a.slurm
    two.a.reaches = name


def follow(two: Clusters, turns: int, seconds: float = 5.0) -> None:
    for _ in range(turns):
        for site in two.sites:
            site.tick()
        two.a.slurm.step(seconds)
        two.clock.advance(-seconds)
        two.b.slurm.step(seconds)


def test_the_controller_of_a_slurm_that_has_moved_takes_its_live_runs_over_by_their_jobs(two: Clusters) -> None:
    name, theirs = two.submit(A, steps=60), two.submit(B, steps=60)
    two.turns(6)
    job = two.a.slurm.running()[0]
    move(two, MOVED)
    two.store.add_user_request(name, "cancel", {}, two.clock.now)
    follow(two, 12)
    assert two.run(name).scheduler == MOVED
    assert two.run(theirs).scheduler == B
    follow(two, 60)
    assert (two.run(name).state, two.run(theirs).state) == (RunState.CANCELLED, RunState.SUCCEEDED)
    assert [attempt.job_id for attempt in two.store.attempts(name)] == [job.job_id]
    assert not two.store.user_requests()


def test_a_run_whose_job_ends_after_the_move_goes_on(two: Clusters) -> None:
    name = two.submit(A, steps=400)
    two.turns(6)
    move(two, MOVED)
    two.a.slurm.preempt(two.a.slurm.running()[0])
    follow(two, 400)
    assert two.run(name).state is RunState.SUCCEEDED
    assert len(two.store.attempts(name)) == 2


def test_a_run_whose_job_only_accounting_remembers_goes_on_after_the_move(two: Clusters) -> None:
    name = two.submit(A, steps=400)
    two.turns(6)
    two.a.slurm.preempt(two.a.slurm.running()[0])
    two.a.slurm.step(30.0)
    two.a.slurm.step(MIN_JOB_AGE + 30.0)
    move(two, MOVED)
    follow(two, 400)
    assert (two.run(name).scheduler, two.run(name).state) == (MOVED, RunState.SUCCEEDED)
    assert len(two.store.attempts(name)) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_is_taken_over_without_a_job_of_the_run(two: Clusters, lost: bool) -> None:
    name = two.submit(A, steps=4000)
    two.turns(6)
    if lost:
        two.a.slurm.forget(two.a.slurm.running()[0])
    move(two, MOVED if lost else RENAMED)
    follow(two, 100)
    assert two.run(name).scheduler == A
    assert [attempt.state for attempt in two.store.attempts(name)] == [AttemptState.RUNNING]


def test_another_run_of_this_name_is_no_evidence(two: Clusters) -> None:
    name = two.submit(A, steps=4000)
    two.turns(6)
    two.store.change(Attempt, {"nonce": "0badbeef"}, run=name)
    move(two, MOVED)
    follow(two, 30)
    assert two.run(name).scheduler == A


def test_a_run_that_was_never_submitted_goes_on_where_a_person_says(two: Clusters) -> None:
    name = two.submit(A, steps=60)
    move(two, RENAMED)
    follow(two, 10)
    assert two.run(name).scheduler == A
    two.store.add_user_request(name, "resume", {"here": RENAMED}, two.clock.now)
    follow(two, 60)
    assert (two.run(name).scheduler, two.run(name).state) == (RENAMED, RunState.SUCCEEDED)
    assert not two.store.user_requests()
