"""When a restore test is due, of which checkpoint, on which layout, and what holds it back."""

from dataclasses import replace
from datetime import datetime
from random import Random
from typing import Any

import pytest

from orchestrator.config.restore_tests_config import RestoreTestsConfig
from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.registry.records import Attempt, Checkpoint, RestoreTest, Run
from orchestrator.restore_tests.due import AGAIN_AFTER, Due, RunFacts, cron_time, next_test
from orchestrator.states import AttemptState, RunState, Trust
from trainer.protocol.config_sections.watch_config import WatchConfig

NOW = 1_000_000.0
DAY = 86400.0


def checkpoint(step: int, trust: Trust = Trust.COMMITTED) -> Checkpoint:
    name = f"step-{step:08d}.001-ab"
    return Checkpoint(run="r-1", name=name, step=step, attempt=1, trust=trust, bytes=1, path="", committed_at=0.0)


def ended(step: int, verdict: str, *, ago: float = 100.0, layout: str = "same", **more: Any) -> RestoreTest:
    return RestoreTest(
        **{
            "test": f"t-{step}-{ago}", "run": "r-1", "checkpoint": checkpoint(step).name, "layout": layout,
            "step": step, "begun_at": NOW - ago - 50, "ended_at": NOW - ago, "verdict": verdict, **more,
        }
    )  # fmt: skip


def facts(
    *, trained: float = 2 * DAY, state: RunState = RunState.RUNNING, steps: tuple[int, ...] = (300, 200, 100),
    tests: tuple[RestoreTest, ...] = (), spent: float = 0.0, program: tuple[str, ...] = (), instrument: str = "auto",
    **settings: Any,
) -> RunFacts:  # fmt: skip
    config = RunConfig(
        cluster=ClusterConfig(nodes=4, ranks_per_node=8), restore_tests=RestoreTestsConfig(**settings), command=program,
        watch=WatchConfig(instrument=instrument),
    )  # fmt: skip
    run = Run(
        name="r-1", state=state, reason="", cluster="slurm", run_dir="/r-1", config_digest="", total_steps=300,
        created_at=NOW - trained, updated_at=NOW - 10,
    )  # fmt: skip
    attempt = Attempt(
        run="r-1", number=1, state=AttemptState.RUNNING, nonce="ab", job_name="j", started_at=NOW - trained
    )
    return RunFacts(
        run=run, config=config, attempts=(attempt,), checkpoints=tuple(map(checkpoint, steps)), tests=tests, spent=spent
    )


def due(given: RunFacts, now: float = NOW) -> Due | None:
    return next_test(given, now, Random(0))


def test_the_newest_unproven_one_of_a_run_that_has_trained_for_a_day() -> None:
    found = due(facts())
    assert found is not None
    assert (found.step, found.layout, found.at <= NOW, found.refused) == (300, "same", True, "")


def test_a_run_that_has_trained_for_less_is_not_due_yet() -> None:
    found = due(facts(trained=0.75 * DAY))
    assert found is not None
    assert found.at == pytest.approx(NOW + 0.25 * DAY)


def test_time_in_the_queue_is_no_training() -> None:
    given = facts(trained=7 * DAY)
    ended_one = replace(given.attempts[0], state=AttemptState.ENDED, started_at=NOW - 7 * DAY, ended_at=NOW - 6.5 * DAY)
    queued = replace(given.attempts[0], number=3, state=AttemptState.SUBMITTED, started_at=None)
    live = replace(given.attempts[0], number=2, started_at=NOW - 0.25 * DAY)
    found = due(replace(given, attempts=(ended_one, live, queued)))
    assert found is not None
    assert found.at == pytest.approx(NOW + 0.25 * DAY)


def test_the_interval_counts_from_the_last_test() -> None:
    found = due(facts(tests=(ended(200, "RESTORED", ago=0.5 * DAY - 50),)))
    assert found is not None
    assert (found.step, found.at) == (300, NOW + 0.5 * DAY)


@pytest.mark.parametrize("every", ["off", "1d"])
def test_the_last_one_of_a_run_that_has_succeeded_is_tested_once(every: str) -> None:
    short = facts(trained=3600, state=RunState.SUCCEEDED, every=every, budget=10.0)
    found = due(short)
    if every == "off":
        assert found is None
        return
    assert found is not None
    assert (found.step, found.refused) == (300, "")
    assert due(replace(short, tests=(ended(300, "RESTORED"),))) is None


def test_a_run_that_has_failed_is_left_alone() -> None:
    assert due(facts(state=RunState.FAILED)) is None


def test_one_test_of_a_run_at_a_time() -> None:
    assert due(facts(tests=(replace(ended(300, ""), ended_at=None),))) is None


@pytest.mark.parametrize("verdict", ["SUSPECT", "CORRUPT"])
def test_after_a_bad_one_the_next_older_one_at_once(verdict: str) -> None:
    bad = ended(300, verdict)
    given = facts(tests=(bad,))
    found = due(given)
    assert found is not None
    assert (found.step, found.at) == (200, bad.ended_at)
    assert f"step 300 was found {verdict}" in found.why
    proven = due(replace(given, tests=(ended(200, "RESTORED", ago=9999), bad)))
    assert proven is not None
    assert proven.at > NOW, "an older one is known to be good: the schedule goes on"


@pytest.mark.parametrize("trust", [Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED, Trust.WRITING])
def test_after_a_bad_one_an_older_one_that_nothing_trusts_is_passed_over(trust: Trust) -> None:
    given = replace(
        facts(tests=(ended(300, "SUSPECT"),)),
        checkpoints=(checkpoint(300, Trust.SUSPECT), checkpoint(200, trust), checkpoint(100)),
    )
    found = due(given)
    assert found is not None
    assert (found.step, found.at) == (100, NOW - 100)


def test_doubted_and_deleted_ones_are_not_chosen() -> None:
    given = replace(
        facts(), checkpoints=(checkpoint(400, Trust.CORRUPT), checkpoint(300, Trust.SUSPECT), checkpoint(200))
    )  # fmt: skip
    found = due(given)
    assert found is not None
    assert found.step == 200


def test_every_layout_in_turn() -> None:
    first = ended(300, "RESTORED")
    found = due(facts(tests=(first,), layouts=("same", "1")))
    assert found is not None
    assert (found.step, found.layout, found.at <= NOW) == (300, "1", True)


@pytest.mark.parametrize(("sample", "step"), [("newest", 300), ("oldest", 100), ("unproven", 200)])
def test_samples(sample: str, step: int) -> None:
    given = facts(tests=(ended(300, "RESTORED", ago=2 * DAY),), sample=sample)
    found = due(given)
    assert found is not None
    assert found.step == step


def test_a_random_sample_meets_all_of_them() -> None:
    given = facts(sample="random")
    assert {next_test(given, NOW, Random(seed)).step for seed in range(50)} == {100, 200, 300}  # type: ignore[union-attr]


def test_what_was_not_finished_is_due_again_after_a_pause_that_grows() -> None:
    once = (ended(300, "NOT_FINISHED", ago=60),)
    found = due(facts(tests=once))
    assert found is not None
    assert (found.step, found.at) == (300, NOW - 60 + AGAIN_AFTER)
    thrice = (*(ended(300, "NOT_FINISHED", ago=ago) for ago in (9000, 5000)), *once)
    again = due(facts(tests=thrice))
    assert again is not None
    assert again.at == NOW - 60 + 4 * AGAIN_AFTER
    assert "the last 3 did not finish" in again.why


def test_the_budget_wins_over_the_schedule() -> None:
    used = 2 * DAY * 32
    assert due(facts(spent=0.005 * used - 180 * 32)).refused == ""  # type: ignore[union-attr]
    over = due(facts(spent=0.005 * used - 180 * 32 + 1))
    assert over is not None
    assert over.refused.startswith("over the budget: 0.50% of 1536.00 rank-hours")


def test_what_a_test_of_the_layout_took_is_the_estimate() -> None:
    seen = ended(200, "RESTORED", ago=2 * DAY, evidence={"seconds": 1000.0})
    found = due(facts(tests=(seen,)))
    assert found is not None
    assert "the test needs about 32000" in found.refused


def test_a_smaller_layout_costs_less() -> None:
    found = due(facts(layouts=("1",), trained=1.1 * DAY))
    assert found is not None
    assert found.refused == ""
    whole = due(facts(layouts=("same",), trained=DAY / 30, every="30m"))
    assert whole is not None
    assert whole.refused


PROGRAM = ("python", "train.py")


def test_a_program_whose_steps_are_unknown_needs_a_restore_program() -> None:
    found = due(facts(program=PROGRAM, instrument="off"))
    assert found is not None
    assert "needs restore_tests.command" in found.refused
    for known in (facts(program=PROGRAM), facts(program=PROGRAM, instrument="off", command=("python", "restore.py"))):
        found = due(known)
        assert found is not None
        assert found.refused == ""


def test_the_last_checkpoint_of_a_finished_program_leaves_it_nothing_to_train() -> None:
    assert due(facts(state=RunState.SUCCEEDED, budget=10.0, program=PROGRAM)) is None
    restores = facts(state=RunState.SUCCEEDED, budget=10.0, program=PROGRAM, command=("python", "restore.py"))
    assert due(restores) is not None


def test_nightly_and_crontab_lines() -> None:
    at_two = datetime(2026, 11, 22, 2, 0).timestamp()
    assert cron_time("0 3 * * *", at_two) == at_two + 3600
    given = facts(every="nightly", tests=(ended(200, "RESTORED", ago=2 * DAY),))
    found = due(given)
    assert found is not None
    assert found.at <= NOW


def test_a_bad_one_is_not_tested_again_and_again() -> None:
    bad, older = ended(300, "SUSPECT", ago=300), ended(200, "RESTORED", ago=200)
    assert due(facts(state=RunState.SUCCEEDED, budget=10.0, tests=(bad, older))) is None
    live = due(facts(tests=(bad, replace(older, begun_at=NOW - 9 * DAY))))
    assert live is not None
    assert live.step == 100, "the newest that nobody has tested"
    again = due(facts(state=RunState.SUCCEEDED, budget=10.0, tests=(bad, older, ended(300, "RESTORED", ago=100))))
    assert again is None


def test_how_far_back_is_good_is_worth_more_than_the_budget() -> None:
    found = due(facts(spent=1e12, tests=(ended(300, "CORRUPT"),)))
    assert found is not None
    assert (found.step, found.refused) == (200, "")


def test_a_thousand_failures_in_a_row_are_a_pause_of_a_day_at_most() -> None:
    found = due(facts(tests=tuple(ended(300, "NOT_FINISHED", ago=60.0 + n) for n in range(2000, 0, -1))))
    assert found is not None
    assert found.at == pytest.approx(NOW - 61 + DAY)


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.SUCCEEDED])
def test_what_was_not_comparable_blames_nothing_and_is_not_repeated_at_once(state: RunState) -> None:
    ended_now = ended(300, "NOT_COMPARABLE", ago=60)
    found = due(facts(state=state, budget=10.0, tests=(ended_now,)))
    if state is RunState.SUCCEEDED:
        assert found is None
        return
    assert found is not None
    assert (found.step, found.at) == (300, ended_now.begun_at + DAY)
    after = facts(state=state, budget=10.0, tests=(ended(300, "SUSPECT", ago=300), replace(ended_now, step=200)))
    assert due(after).at > NOW, "the search for a good one ends where nothing can be found out"  # type: ignore[union-attr]


def test_a_test_that_was_not_comparable_takes_back_no_bad_verdict() -> None:
    tests = (ended(300, "CORRUPT", ago=900), ended(200, "RESTORED", ago=800), ended(300, "NOT_COMPARABLE", ago=700))
    found = due(facts(tests=tests))
    assert found is not None
    assert found.step == 100, "only a person has a bad one tested again"
