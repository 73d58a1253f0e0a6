"""Checkpoints that are doubted between attempts, by the same rule as within one."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.recovery.doubted_checkpoints import trust_changes
from orchestrator.registry.records import Attempt, Checkpoint, Generation, RestoreTest
from orchestrator.states import AttemptState, Trust
from trainer.protocol.failures.outcome import Failure, FailureKind

SEGFAULT = Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 was killed by SIGSEGV", signal=11, step=103)


def attempt(number: int, failure: Failure | None = None) -> Attempt:
    return Attempt(
        run="r", number=number, state=AttemptState.ENDED, nonce="n", job_name=f"j{number}", generations=1,
        failure=failure.to_json() if failure else None,
    )  # fmt: skip


def generation(attempt: int, number: int, restored: int | None, **fields: Any) -> Generation:
    usual = {"started_at": 100.0 * attempt + number, "last_step": 103}
    return Generation(**{"run": "r", "attempt": attempt, "number": number, "resumed_from": restored, **usual, **fields})


def saved(step: int, at: float = 1.0, trust: Trust = Trust.RESTORED, name: str = "") -> Checkpoint:
    return Checkpoint(
        run="r", name=name or f"s{step}", step=step, attempt=1, trust=trust, bytes=1, path="/p", committed_at=at
    )


def newly_suspect(*given: Any) -> list[tuple[Checkpoint, str]]:
    return [(item, why) for item, trust, why in trust_changes(*given) if trust is Trust.SUSPECT]


ATTEMPTS = [attempt(1, SEGFAULT), attempt(2)]
GENERATIONS = [generation(1, 1, 100), generation(2, 1, 100)]


def test_two_attempts_that_fall_alike_after_loading_it():
    ((item, reason),) = newly_suspect(ATTEMPTS, GENERATIONS, [saved(100), saved(90)], SEGFAULT)
    assert item.step == 100
    assert reason == "rank_killed by SIGSEGV twice soon after loading it, at step 103 and at step 103"


@pytest.mark.parametrize(
    "newest",
    [
        None,
        Failure(kind=FailureKind.RANK_KILLED, reason="?", signal=9, step=103),
        Failure(kind=FailureKind.NODE_LOST, reason="?"),
        Failure(kind=FailureKind.RANK_KILLED, reason="?", signal=11, step=150),
    ],
)
def test_another_failure_or_one_later_on_is_no_reason(newest):
    assert newly_suspect(ATTEMPTS, GENERATIONS, [saved(100)], newest) == []


def test_attempts_that_began_from_different_checkpoints():
    assert newly_suspect(ATTEMPTS, [generation(1, 1, 90), generation(2, 1, 100)], [saved(100)], SEGFAULT) == []


def test_generations_of_one_attempt_count_too():
    fell = SEGFAULT.to_json()
    generations = [generation(1, 1, None, failure=fell), generation(1, 2, 100, failure=fell), generation(1, 3, 100)]
    assert [item.step for item, _ in newly_suspect([attempt(1)], generations, [saved(100)], SEGFAULT)] == [100]


def test_a_checkpoint_of_the_same_step_that_was_made_later_is_another_state():
    found = newly_suspect(
        ATTEMPTS, GENERATIONS, [saved(100, at=1.0, name="old"), saved(100, at=999.0, name="new")], SEGFAULT
    )
    assert [item.name for item, _ in found] == ["old"]


@pytest.mark.parametrize("trust", [Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED])
def test_what_is_doubted_already_or_gone_stays(trust):
    assert newly_suspect(ATTEMPTS, GENERATIONS, [saved(100, trust=trust)], SEGFAULT) == []


# -- the program is the cause

BUG = Failure(kind=FailureKind.EXCEPTION, reason="rank 0 raised KeyError: x", exception="KeyError", message="x")
THREE = [saved(30), saved(20), saved(10)]


def history(*loads: tuple[int, int], failure: Failure = BUG, **fields: Any) -> list[Generation]:
    """Generations of attempt 1 that failed alike: the step that each loaded, and its last step."""
    return [
        generation(1, number, restored, last_step=step, failure=replace(failure, step=step).to_json(), **fields)
        for number, (restored, step) in enumerate(loads, start=1)
    ]


def changed(
    generations: list[Generation], rows: list[Checkpoint], newest: Failure | None, **more: Any
) -> dict[int, Trust]:
    return {item.step: trust for item, trust, _ in trust_changes([attempt(1)], generations, rows, newest, **more)}


def test_a_failure_that_follows_every_checkpoint_marks_none():
    loads = [(30, 32), (30, 32), (20, 22), (20, 22), (10, 12), (10, 12)]
    marked = [saved(30, trust=Trust.SUSPECT), saved(20, trust=Trust.SUSPECT), saved(10)]
    assert changed(history(*loads[:4]), THREE, replace(BUG, step=22)) == {20: Trust.SUSPECT, 30: Trust.SUSPECT}
    assert changed(history(*loads), marked, replace(BUG, step=12)) == {30: Trust.RESTORED, 20: Trust.RESTORED}


def test_a_failure_that_ends_the_run_as_an_error_of_the_program_takes_its_marks_back():
    past, rows = history((30, 32), (30, 32), (20, 32)), [saved(30, trust=Trust.SUSPECT), saved(20), saved(10)]
    ended = replace(BUG, kind=FailureKind.USER_ERROR, step=32)
    assert changed(past, rows, ended) == {30: Trust.RESTORED}
    assert changed(past, rows, replace(ended, drill="kill-rank")) == {}
    other = replace(ended, exception="TypeError", message="y")
    assert changed(past, rows, other) == {}
    numeric = Failure(kind=FailureKind.NUMERIC, reason="nan", exception="BadStep", step=32)
    assert changed(history((30, 32), (30, 32), failure=numeric), rows, other) == {}


def test_what_was_loaded_from_memory_only_is_committed_again():
    past, rows = history((30, 32), (30, 32), tier="memory"), [saved(30, trust=Trust.SUSPECT)]
    assert changed(past, rows, replace(BUG, kind=FailureKind.USER_ERROR, step=32)) == {30: Trust.COMMITTED}


@pytest.mark.parametrize(
    ("verdicts", "after"), [(["SUSPECT"], {}), (["SUSPECT", "RESTORED", "NOT_FINISHED"], {30: Trust.RESTORED})]
)
def test_the_mark_of_a_restore_test_stays_until_another_passes(verdicts: list[str], after: dict[int, Trust]):
    tests = [
        RestoreTest(
            test=f"t{at}", run="r", checkpoint="s30", layout="same", step=30, begun_at=at, ended_at=at, verdict=verdict
        )
        for at, verdict in enumerate(verdicts)
    ]
    rows, ended = [saved(30, trust=Trust.SUSPECT)], replace(BUG, kind=FailureKind.USER_ERROR, step=32)
    assert changed(history((30, 32), (30, 32)), rows, ended, tests=tests) == after


def test_the_failures_of_earlier_attempts_alone_mark_nothing_again():
    generations = [generation(1, 1, 100, failure=SEGFAULT.to_json()), generation(1, 2, 100), generation(2, 1, 100)]
    attempts = [attempt(1, SEGFAULT), attempt(2)]
    assert newly_suspect(attempts, generations, [saved(100)], replace(BUG, step=102)) == []
    assert newly_suspect(attempts, generations, [saved(100)], SEGFAULT) != []
