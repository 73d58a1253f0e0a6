"""Decisions between attempts: tables with their reasons, and what holds for every history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recovery.policy import Action, Decision, Past, after_cancel, decide, delay
from trainer.contract.config import RecoveryConfig
from trainer.contract.outcome import Failure, FailureKind

CONFIG = RecoveryConfig()
NOW = 1000.0


def past(number: int, kind: FailureKind, saved: int | None, *, started: bool = True) -> Past:
    return Past(number=number, kind=kind, started=started, saved_step=saved)


def after(*history: Past, config: RecoveryConfig = CONFIG, steps_known: bool = True, jitter: float = 1.0) -> Decision:
    kind = history[-1].kind
    failure = Failure(kind=kind, reason="its reason") if kind else None
    return decide(history, failure, config, NOW, jitter, steps_known=steps_known)


TABLE = {
    "rank killed": ([past(1, FailureKind.RANK_KILLED, 10)], Action.RETRY, "again after rank_killed, in 10 s"),
    "node lost": ([past(1, FailureKind.NODE_LOST, 10)], Action.RETRY, "again after node_lost"),
    "job lost": ([past(1, FailureKind.JOB_LOST, None, started=False)], Action.RETRY, "again after job_lost"),
    "launch failed": ([past(1, FailureKind.LAUNCH_FAILED, None, started=False)], Action.RETRY, "launch_failed"),
    "preempted": ([past(1, FailureKind.PREEMPTED, 10)], Action.RETRY, "goes on after preempted"),
    "time limit": ([past(1, FailureKind.TIME_LIMIT, 10)], Action.RETRY, "goes on after time_limit"),
    "user": ([past(1, FailureKind.USER_ERROR, 10)], Action.FAIL, "the training code failed: its reason"),
    "storage": ([past(1, FailureKind.STORAGE, 10)], Action.HOLD, "storage must be mended first: its reason"),
    "rejected": ([past(1, FailureKind.SUBMIT_REJECTED, None)], Action.HOLD, "the job was refused: its reason"),
    "scancel": ([past(1, FailureKind.CANCELLED, 10)], Action.HOLD, "its reason"),
    "hang": ([past(1, FailureKind.HANG, 10)], Action.RETRY, "again after hang, in 10 s: its reason"),
    "hangs cost": ([past(n, FailureKind.HANG, n) for n in range(1, 11)], Action.FAIL, "10 failed attempts"),
    "desync": (
        [past(1, FailureKind.DESYNC, 10)], Action.HOLD,
        "ranks called different collectives: its reason; that is a bug of the program",
    ),
    "numeric": (
        [past(1, FailureKind.NUMERIC, 10)], Action.HOLD, "a rollback did not mend the loss: its reason; mend the data",
    ),
    "stalled": ([past(n, FailureKind.RANK_KILLED, None) for n in (1, 2, 3)], Action.HOLD, "3 attempts in a row"),
    "stalled at the same step": (
        [past(1, FailureKind.RANK_KILLED, 50), *[past(n, FailureKind.RANK_KILLED, 50) for n in (2, 3, 4)]],
        Action.HOLD, "made no new checkpoint",
    ),
    "stalled by preemption": ([past(n, FailureKind.PREEMPTED, None) for n in (1, 2, 3)], Action.HOLD, "3 attempts"),
    "lost before it ran is no try": (
        [past(n, FailureKind.JOB_LOST, None, started=False) for n in range(1, 6)], Action.RETRY, "job_lost",
    ),
    "budget": ([past(n, FailureKind.RANK_KILLED, n) for n in range(1, 11)], Action.FAIL, "10 failed attempts"),
    "preemptions cost nothing": (
        [past(n, FailureKind.PREEMPTED, n) for n in range(1, 100)], Action.RETRY, "goes on after preempted",
    ),
    "preempted with nothing new costs": (
        [past(1, FailureKind.RANK_KILLED, 5), past(2, FailureKind.PREEMPTED, 5)], Action.RETRY,
        "again after preempted, in 20 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    history, action, words = TABLE[name]
    decision = after(*history)
    assert decision.action is action
    assert words in decision.reason


def test_a_finished_attempt_is_success() -> None:
    assert decide([past(1, FailureKind.UNKNOWN, 1)], None, CONFIG, NOW, 0.0).action is Action.SUCCEED


def test_attempts_of_any_kind_are_bounded() -> None:
    config = RecoveryConfig(max_attempts=3)
    decision = after(*[past(n, FailureKind.PREEMPTED, n) for n in (1, 2, 3)], config=config)
    assert (decision.action, decision.reason) == (Action.HOLD, "3 attempts (recovery.max_attempts) are used up")


def test_pauses_double_up_to_the_limit_and_begin_anew_after_progress() -> None:
    killed = FailureKind.RANK_KILLED
    config = RecoveryConfig(no_progress=100, max_failures=100)
    waits = [
        after(*[past(n, killed, None) for n in range(1, count + 1)], config=config).not_before - NOW
        for count in (1, 2, 3, 20)
    ]
    assert waits == [10.0, 20.0, 40.0, 900.0]
    # Attempt 3 got somewhere: its failure is the first of a new row.
    assert after(past(1, killed, None), past(2, killed, None), past(3, killed, 5)).not_before - NOW == 10.0


def test_a_foreign_script_is_trusted_to_advance_until_it_fails() -> None:
    limit = [past(n, FailureKind.TIME_LIMIT, None) for n in range(1, 30)]
    assert after(*limit, steps_known=False).action is Action.RETRY
    killed = [past(n, FailureKind.RANK_KILLED, None) for n in (1, 2, 3)]
    assert after(*killed, steps_known=False).action is Action.HOLD


def test_a_cancel_says_what_was_saved() -> None:
    assert after_cancel(40).reason == "cancelled by `orch cancel`; the newest checkpoint is of step 40"
    assert after_cancel(None).action is Action.CANCEL


attempts = st.builds(
    Past,
    number=st.just(1),
    kind=st.sampled_from(list(FailureKind)),
    started=st.booleans(),
    saved_step=st.none() | st.integers(0, 50),
)
histories = st.lists(attempts, min_size=1, max_size=30)


@given(histories, st.floats(0, 1, exclude_max=True), st.booleans())
def test_every_decision_has_a_reason_and_a_pause_within_bounds(
    history: list[Past], jitter: float, steps_known: bool
) -> None:
    decision = after(*history, jitter=jitter, steps_known=steps_known)
    assert decision.reason
    assert decision.action in (Action.RETRY, Action.FAIL, Action.HOLD)
    if decision.action is Action.RETRY:
        assert NOW <= decision.not_before <= NOW + CONFIG.backoff_max
    assert Decision.from_json(decision.to_json()) == decision


@given(histories)
def test_attempts_that_get_nowhere_come_to_a_stop(history: list[Past]) -> None:
    stuck = [past(1, FailureKind.UNKNOWN, None)] * max(CONFIG.no_progress, CONFIG.max_failures)
    assert after(*history, *stuck).action in (Action.HOLD, Action.FAIL)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_by_half_at_most(row: int, jitter: float) -> None:
    assert delay(row, CONFIG, 1.0) / 2 <= delay(row, CONFIG, jitter) <= delay(row, CONFIG, 1.0) <= CONFIG.backoff_max
