"""Checkpoints that are doubted between attempts, by the same rule as within one."""

from typing import Any

import pytest

from orchestrator.recovery.retry_policy import newly_suspect
from orchestrator.registry.records import Attempt, Checkpoint, Generation
from orchestrator.states import AttemptState, Trust
from trainer.contract.failures.outcome import Failure, FailureKind

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
