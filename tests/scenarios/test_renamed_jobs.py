"""Stories of sites that change jobs after sbatch, of lists that lack some, and of jobs that nobody can find."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from orchestrator import failpoints
from orchestrator.controller.submission_limits import MOST_FOR_ATTEMPT, MOST_IN_AN_HOUR
from orchestrator.errors import SubmitAmbiguous
from orchestrator.states import ENDED_RUNS, AttemptState, RunState
from tests.fakes.model_slurm import REWRITES, SlurmFaults
from tests.fakes.new_runs import create_run
from tests.scenarios.world import World, config, moves, training

SITES = {
    "name": {"name"},
    "comment": {"comment"},
    "name and comment": {"name", "comment"},
    "files": {"files"},
    "submit time": {"submit_time"},
    "all but the id": REWRITES,
}
every_site = pytest.mark.parametrize("rewrites", SITES.values(), ids=SITES)


def submits(world: World) -> int:
    return sum(call.startswith("submit") for call in world.slurm.calls)


@every_site
def test_a_changed_job_is_adopted_and_told_of_never_submitted_again(tmp_path: Path, rewrites: set[str]) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(rewrites=frozenset(rewrites))
    world.turns(1)
    assert world.attempts[0].state is AttemptState.SUBMITTED
    told = [move.reason for move in world.store.transitions(world.name) if move.after == AttemptState.SUBMITTED]
    assert ("renamed the job: orch-sim-1-1-00000001 -> site-1" in told[0]) == ("name" in rewrites)
    assert ("changed its comment to 'managed by the site'" in told[0]) == ("comment" in rewrites)
    assert ("renamed the job" in world.run.reason) == ("name" in rewrites)
    assert world.finish().state is RunState.SUCCEEDED
    assert (submits(world), len(world.slurm.jobs), len(world.attempts)) == (1, 1, 1)


@every_site
@pytest.mark.parametrize("seed", range(3))
def test_such_a_site_with_bad_days_too(
    tmp_path: Path, rewrites: set[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    world = World(tmp_path, seed, data=config(steps=60))
    world.slurm.slurm_faults = SlurmFaults(rewrites=frozenset(rewrites), partial=0.2, garbled=0.1, accounting_lag=5.0)
    world.kill_at = lambda point: rng.random() < 0.03
    monkeypatch.setattr(failpoints, "reach", world.reach)
    for _ in range(40):
        if (running := world.slurm.running()) and rng.random() < 0.1:
            world.slurm.preempt(rng.choice(running))
        world.turns(1, rng.choice([1.0, 7.0]))
    world.kill_at = lambda point: False
    world.slurm.slurm_faults = SlurmFaults(rewrites=frozenset(rewrites))
    assert world.finish().state is RunState.SUCCEEDED, world.run.reason


def test_an_admin_renames_a_job_that_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 12)
    world.slurm.rewrite(world.slurm.jobs[0], {"name", "comment", "files"})
    world.tick()
    assert "Slurm renamed the job: orch-sim-1-1-00000001 -> site-1" in world.run.reason
    assert world.finish().state is RunState.SUCCEEDED
    assert (submits(world), len(world.attempts)) == (1, 1)


@pytest.mark.parametrize("point", ["after_sbatch", "after_submit", "after_find", "after_adopt"])
def test_a_controller_that_dies_right_after_sbatch_finds_the_renamed_job(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(rewrites=frozenset({"name", "comment"}))
    world.kill_at = lambda reached: reached == point and world.lives == 1
    monkeypatch.setattr(failpoints, "reach", world.reach)
    assert world.finish().state is RunState.SUCCEEDED
    assert (world.lives, submits(world), len(world.slurm.jobs)) == (2, 1, 1)


def test_the_id_in_the_name_of_a_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(rewrites=REWRITES)
    submit = world.slurm.submit

    def submit_and_name(spec: object) -> str | None:
        job_id = submit(spec)  # type: ignore[arg-type]
        spec.submission.mkdir(parents=True, exist_ok=True)  # type: ignore[attr-defined]
        (spec.submission / f"{job_id}_submission.sh").touch()  # type: ignore[attr-defined]
        return job_id

    monkeypatch.setattr(world.slurm, "submit", submit_and_name)
    world.kill_at = lambda reached: reached == "after_sbatch" and world.lives == 1
    monkeypatch.setattr(failpoints, "reach", world.reach)
    assert world.finish().state is RunState.SUCCEEDED
    assert (world.lives, submits(world), len(world.slurm.jobs)) == (2, 1, 1)


def invisible(world: World) -> None:
    """sbatch answers with ids, and no list ever shows these jobs."""
    world.slurm.hidden = {str(number) for number in range(1, 1000)}


def test_jobs_that_nobody_can_find_hold_the_run_after_three(tmp_path: Path) -> None:
    world = World(tmp_path)
    invisible(world)
    waits = set()
    for _ in range(2000):
        world.turns(1)
        waits.add(world.run.reason.partition(":")[0])
    assert world.run.state is RunState.HELD
    assert submits(world) == MOST_FOR_ATTEMPT
    assert "sbatch gave the job ids 1, 2, 3" in world.run.reason
    assert "`scancel 1 2 3`; when it is fixed: orch resume sim-1" in world.run.reason
    assert "waits for its job to be found" in waits


def test_what_turns_up_later_is_ended_by_its_id(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(rewrites=frozenset({"name", "comment", "files"}))
    invisible(world)
    world.turns(2000, until=lambda: world.run.state is RunState.HELD)
    world.slurm.hidden = set()
    world.store.add_user_request(world.name, "resume", {}, world.clock.now)
    world.turns(1)
    assert world.finish().state is RunState.SUCCEEDED
    assert [job.job_id for job in world.slurm.jobs if job.state == "CANCELLED"] == ["1", "2", "3"]
    assert not [one for one in world.store.submissions(world.name) if not one.outcome]


def test_sbatch_that_fails_without_an_id_is_tried_for_longer_than_three_times(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(ambiguous=1.0, lost=1.0)
    world.turns(600)
    assert world.run.state is not RunState.HELD
    counts = {attempt.number: 0 for attempt in world.attempts}
    for one in world.store.submissions(world.name):
        counts[one.attempt] += 1
    assert max(counts.values()) == MOST_FOR_ATTEMPT
    assert len(counts) > 1
    world.slurm.slurm_faults = SlurmFaults()
    assert world.finish().state is RunState.SUCCEEDED


def test_no_more_than_twenty_in_an_hour_over_all_runs_and_restarts(tmp_path: Path) -> None:
    world = World(tmp_path)
    digest = world.run.config_digest
    for number in range(2, 12):
        create_run(
            world.store, tmp_path, config_digest=digest, total_steps=40, now=world.clock.now, nonce=f"{number:08x}"
        )
    invisible(world)
    begun = world.clock.now
    while world.clock.now - begun < 3500.0:
        world.turns(10, 10.0)
        world.start_controller()
    assert submits(world) == MOST_IN_AN_HOUR
    waiting = [run for run in world.store.runs() if run.state not in ENDED_RUNS | {RunState.HELD}]
    assert waiting
    for run in waiting:
        assert "waits until 1970-01-12 14:4" in run.reason, run.reason
    assert all(run.reason for run in world.store.runs())
    world.turns(100, 10.0)
    assert submits(world) > MOST_IN_AN_HOUR


def test_jobs_that_start_as_they_should_do_not_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    for number in range(2, 42):
        create_run(
            world.store,
            tmp_path,
            config_digest=world.run.config_digest,
            total_steps=40,
            now=world.clock.now,
            nonce=f"{number:08x}",
        )
    world.turns(2)
    assert {run.state for run in world.store.runs()} == {RunState.QUEUED}


def test_a_list_without_the_waiting_job_gives_no_second_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(2)
    world.slurm.hidden = {"1"}
    world.turns(300, until=lambda: len(world.attempts) > 1)
    assert world.attempts[0].state is AttemptState.LOST
    assert world.slurm.jobs[0].state == "CANCELLED"
    world.slurm.hidden, world.slurm.down = set(), set()
    assert world.finish().state is RunState.SUCCEEDED


def test_a_stranger_who_has_the_id_of_a_lost_job_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.down = set(world.slurm.nodes)
    world.turns(2)
    world.slurm.jobs.clear()
    world.clock.advance(2.0)
    world.slurm._next_id = 1
    world.slurm.add_foreign("eval", state="RUNNING")
    world.slurm.down = set()
    assert world.finish().state is RunState.SUCCEEDED
    assert world.slurm.jobs[0].state == "RUNNING"
    assert "cancel 1" not in world.slurm.calls


@pytest.mark.parametrize("answer", ["partial", "garbled"])
def test_answers_that_lack_rows_or_cannot_be_read_disturb_nothing(tmp_path: Path, answer: str) -> None:
    world = World(tmp_path, data=config(steps=400))
    world.slurm.slurm_faults = SlurmFaults(**{answer: 0.3})
    assert world.finish().state is RunState.SUCCEEDED
    assert (submits(world), len(world.attempts)) == (1, 1)
    assert moves(world).count("RUNNING") == 1


def test_one_run_s_unreadable_row_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    other, _ = create_run(
        world.store,
        tmp_path,
        config_digest=world.run.config_digest,
        total_steps=40,
        now=world.clock.now,
        nonce="00000002",
    )
    world.turns(3)
    damaged = next(job for job in world.slurm.jobs if job.spec.name.startswith(f"orch-{other.name}"))
    damaged.shown = {"state": "UNREADABLE", "reason": "its row is damaged"}
    assert world.finish().state is RunState.SUCCEEDED
    assert world.store.run(other.name).state is RunState.RUNNING
    assert "cannot be read: its row is damaged" in world.store.run(other.name).reason
    damaged.shown = {}
    world.turns(300, until=lambda: world.store.run(other.name).state in ENDED_RUNS)
    assert world.store.run(other.name).state is RunState.SUCCEEDED


def test_foreign_jobs_with_marks_like_ours_are_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    training(world, 5)
    ours = world.attempts[0].job_name
    strangers = [
        world.slurm.add_foreign(f"eval-{ours}"),
        world.slurm.add_foreign("eval", f"evaluates orch:{world.name}/1/00000001"),
        world.slurm.add_foreign("orch-nobody-1-1-deadbeef", "x" * 800),
        world.slurm.add_foreign(f"orch-{world.name}-1-ffffffff"),
    ]
    assert world.finish().state is RunState.SUCCEEDED
    assert [job.state for job in strangers] == ["RUNNING"] * 4
    assert submits(world) == 1


def test_a_refusal_is_no_lost_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slurm.slurm_faults = SlurmFaults(reject="Invalid account or account/partition combination specified")
    assert world.finish().state is RunState.HELD
    assert [one.outcome for one in world.store.submissions()] == ["refused"]


def test_an_ambiguous_submission_that_made_the_job_is_no_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    submit: Callable[..., str | None] = world.slurm.submit

    def timed_out(spec: object) -> None:
        submit(spec)
        raise SubmitAmbiguous("Socket timed out")

    monkeypatch.setattr(world.slurm, "submit", timed_out)
    world.turns(1)
    assert [one.outcome for one in world.store.submissions()] == ["adopted"]
