"""Decisions between attempts: tables with their reasons, properties of every history, and drills."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recovery.retry_policy import (
    NONE_INTACT,
    EndedAttempt,
    after_cancel,
    attribute_drill,
    backoff_seconds,
    decide,
    drill_words,
)
from orchestrator.registry.records import Attempt, Notice
from orchestrator.states import AttemptState
from trainer.protocol.config import RecoveryConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import TRAITS, Budget, Failure, FailureKind

CONFIG = RecoveryConfig()
NOW = 1_000_000.0  # Jan 12 13:46:40 UTC


def past(
    number: int, kind: FailureKind, saved: int | None, *, started: bool = True, ago: float = 0.0, trained: float = 0.0,
    step: int | None = None, saved_after: float = 0.0, first: bool = False, **failure: Any,
) -> EndedAttempt:  # fmt: skip
    """An attempt that ended some hours ago; `failure`: further fields of its failure."""
    ended = NOW - ago * 3600
    row = Attempt(
        run="tiny-1", number=number, state=AttemptState.ENDED, nonce="n", job_name="j", saved_step=saved,
        last_step=step, started_at=ended - trained if started else None, ended_at=ended,
    )  # fmt: skip
    found = Failure(kind=kind, reason="its reason", **failure)
    return EndedAttempt(row=row, failure=found, saved_after=saved_after, first_training=first)


def outage(kind: FailureKind, hours: float, times: int) -> list[EndedAttempt]:
    """Return failures in a row, evenly spread over some hours up to now."""
    return [past(n, kind, None, started=False, ago=hours * (times - 1 - n) / max(1, times - 1)) for n in range(times)]


def after(
    *history: EndedAttempt, config: RecoveryConfig = CONFIG, steps_known: bool = True, jitter: float = 1.0
) -> Decision:
    return decide(history, config, NOW, jitter, steps_known=steps_known, run="tiny-1")


def earlier(one: EndedAttempt, seconds: float) -> EndedAttempt:
    assert one.row.started_at is None
    return replace(one, row=replace(one.row, ended_at=one.end_time - seconds))


K = FailureKind
TABLE = {
    "out of memory without progress": ([past(1, K.OUT_OF_MEMORY, None)], Action.HOLD, "its reason"),
    "out of memory after a new checkpoint": (
        [past(1, K.OUT_OF_MEMORY, 10)], Action.RETRY, "out of memory once without a new checkpoint (try 1 of 10)",
    ),
    "out of memory again and nothing saved": (
        [past(1, K.OUT_OF_MEMORY, 10), past(2, K.OUT_OF_MEMORY, 10)], Action.HOLD, "its reason",
    ),
    "rank killed": (
        [past(1, K.RANK_KILLED, 10)], Action.RETRY,
        "rank killed once without a new checkpoint (try 1 of 10); next try at 1970-01-12 13:46:50Z; the last one: its",
    ),
    "node lost": (
        [past(1, K.NODE_LOST, 10)], Action.RETRY,
        "node lost once; holds after 1970-01-13 13:46:40Z unless a checkpoint is saved; "
        "next try at 1970-01-12 13:46:50Z",
    ),
    "boots fail": (
        outage(K.LAUNCH_FAILED, 0.2, 4), Action.RETRY,
        "launch failed 4 times in 12 min; holds after 1970-01-13 13:34:40Z unless a checkpoint is saved; next try at",
    ),
    "less than two minutes": (outage(K.JOB_LOST, 119 / 3600, 4), Action.RETRY, "4 times in 119 s; holds"),
    "two minutes": (outage(K.JOB_LOST, 120 / 3600, 4), Action.RETRY, "4 times in 2 min; holds"),
    "less than two hours": (outage(K.JOB_LOST, 1.98, 4), Action.RETRY, "4 times in 119 min; holds"),
    "two hours": (outage(K.JOB_LOST, 2, 4), Action.RETRY, "4 times in 2.0 h; holds"),
    "several": (
        [past(1, K.NODE_LOST, None, ago=3), *outage(K.JOB_LOST, 2, 2)], Action.RETRY,
        "node lost once, job lost 2 times in 3.0 h; holds",
    ),
    "an outage of almost a day": (outage(K.LAUNCH_FAILED, 23.9, 100), Action.RETRY, "100 times in 23.9 h; holds"),
    "an outage of a day": (
        outage(K.LAUNCH_FAILED, 24, 100), Action.HOLD,
        "launch failed 100 times in 24.0 h without a new checkpoint: recovery.no_progress_hours is spent; the",
    ),
    "few failures with long queues between": (outage(K.NODE_LOST, 200, 9), Action.RETRY, "node lost 9 times in 200"),
    "20 hours, and a clock that was set right by a day in the middle": (
        [*(earlier(one, 86400) for one in outage(K.JOB_LOST, 20, 80)[:40]),
         *outage(K.JOB_LOST, 20, 80)[40:]],
        Action.RETRY, "job lost 80 times in",
    ),
    "20 hours, and a clock that was wrong for some of them": (
        [*outage(K.JOB_LOST, 20, 80)[:20],
         *(earlier(one, 86400) for one in outage(K.JOB_LOST, 20, 80)[20:40]),
         *outage(K.JOB_LOST, 20, 80)[40:]],
        Action.RETRY, "job lost 80 times in",
    ),
    "a refusal that passes": (outage(K.SUBMIT_DEFERRED, 10, 50), Action.RETRY, "submit deferred 50 times in 10.0 h"),
    "every checkpoint damaged, as one node read them": (
        [past(1, K.STORAGE, None, exception=NONE_INTACT)], Action.RETRY, "storage once",
    ),
    "every checkpoint damaged, as two jobs read them": (
        [past(n, K.STORAGE, None, exception=NONE_INTACT) for n in (1, 2)], Action.HOLD,
        "no checkpoint is intact: its reason; `orch ckpt ls tiny-1` lists them",
    ),
    "storage": (outage(K.STORAGE, 2, 5), Action.RETRY, "storage 5 times in 2.0 h; holds after"),
    "storage for a day": (outage(K.STORAGE, 24, 50), Action.HOLD, "storage 50 times in 24.0 h"),
    "nodes missing": ([past(1, K.NODES_MISSING, None)], Action.RETRY, "continues with fewer nodes: its reason"),
    "nodes missing for the hundredth time": (
        outage(K.NODES_MISSING, 99, 100), Action.RETRY, "continues with fewer nodes: its reason",
    ),
    "a failure after waits that were given up": (
        [*outage(K.NODES_MISSING, 50, 50), past(51, K.RANK_KILLED, None)], Action.RETRY,
        "rank killed once without a new checkpoint (try 1 of 10)",
    ),
    "preempted": ([past(1, K.PREEMPTED, 10)], Action.RETRY, "continues after preempted"),
    "time limit": ([past(1, K.TIME_LIMIT, 10)], Action.RETRY, "continues after time_limit"),
    "user": ([past(1, K.USER_ERROR, 10)], Action.FAIL, "the training code failed: its reason"),
    "an exception that is not shown to come back": (
        [past(1, K.EXCEPTION, None)], Action.RETRY,
        "exception once without a new checkpoint (try 1 of 10); next try at 1970-01-12 13:46:50Z; the last one: its",
    ),
    "exceptions with new checkpoints between them": (
        [past(n, K.EXCEPTION, n) for n in range(1, 100)], Action.RETRY, "exception once without a new checkpoint",
    ),
    "exceptions without": (
        [past(n, K.EXCEPTION, 5) for n in range(1, 12)], Action.FAIL,
        "exception 11 times without a new checkpoint: recovery.max_failures is spent; the last one: its reason",
    ),
    "rejected": ([past(1, K.SUBMIT_REJECTED, None)], Action.HOLD, "the job was refused: its reason"),
    "scancel": ([past(1, K.CANCELLED, 10)], Action.HOLD, "its reason"),
    "hang": ([past(1, K.HANG, 10)], Action.RETRY, "hang once without a new checkpoint (try 1 of 10)"),
    "desync": (
        [past(1, K.DESYNC, 10)], Action.HOLD,
        "ranks called different collectives: its reason; this is a bug in the program",
    ),
    "numeric": (
        [past(1, K.NUMERIC, 10)], Action.HOLD, "the loss became unusable: its reason; fix the data",
    ),
    "numeric, of which a checkpoint is left": (
        [past(1, K.NUMERIC, None), past(2, K.NODE_LOST, 10), past(3, K.NUMERIC, None)], Action.HOLD,
        "`orch submit --from tiny-1@STEP KEY=VALUE`, or if there is none with `orch resume tiny-1 KEY=VALUE`",
    ),
    "numeric before anything was saved": (
        [past(1, K.NUMERIC, None)], Action.HOLD,
        "its reason; the run has saved no checkpoint: fix the data or the code, or start again with other "
        "settings (optimizer.lr, optimizer.clip_norm): `orch resume tiny-1 KEY=VALUE`",
    ),
    "tries": (
        [past(n, K.RANK_KILLED, None) for n in range(10)], Action.FAIL,
        "rank killed 10 times without a new checkpoint: recovery.max_failures is spent; the last one: its reason",
    ),
    "tries at the same step": (
        [past(n, K.RANK_KILLED, 50) for n in range(10)], Action.FAIL,
        "rank killed 10 times without a new checkpoint",
    ),
    "tries of several kinds": (
        [past(n, (K.RANK_KILLED, K.HANG)[n % 2], None) for n in range(10)], Action.FAIL,
        "rank killed 5 times, hang 5 times without a new checkpoint",
    ),
    "an outage uses up no tries": (
        [*[past(n, K.RANK_KILLED, None) for n in range(9)], *outage(K.NODE_LOST, 5, 30)], Action.RETRY,
        "node lost 30",
    ),
    "failures with progress between them": (
        [past(n, K.RANK_KILLED, n * 10) for n in range(1, 100)], Action.RETRY, "rank killed once",
    ),
    "node failures with progress between them": (
        [past(n, K.NODE_LOST, n * 10_000, ago=1000 - n) for n in range(1, 100)], Action.RETRY,
        "node lost once; holds",
    ),
    "preemptions with progress": (
        [past(n, K.PREEMPTED, n) for n in range(1, 10_000)], Action.RETRY, "continues after preempted",
    ),
    "preemptions before the first save": (
        outage(K.PREEMPTED, 5, 40), Action.RETRY, "preempted 40 times in 5.0 h; holds after",
    ),
    "time limits that are too short to save": (
        [past(n, K.TIME_LIMIT, None, ago=10 - n) for n in range(10)], Action.FAIL,
        "time limit 10 times without a new",
    ),
    "an attempt with progress does not count as a failure": (
        [past(1, K.TIME_LIMIT, 5), past(2, K.NODE_LOST, 5)], Action.RETRY, "node lost once; holds after",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    history, action, words = TABLE[name]
    decision = after(*history)
    assert decision.action is action
    assert words in decision.reason


def test_a_finished_attempt_is_success() -> None:
    assert after(replace(past(1, K.UNKNOWN, 1), failure=None)).action is Action.SUCCEED


def test_pauses_double_up_to_the_limit_and_begin_anew_after_progress() -> None:
    waits = [
        after(*[past(n, K.NODE_LOST, None) for n in range(1, count + 1)]).not_before - NOW for count in (1, 2, 3, 20)
    ]
    assert waits == [10.0, 20.0, 40.0, 900.0]
    # Attempt 3 got somewhere: its failure is the first of a new row.
    assert after(past(1, K.NODE_LOST, None), past(2, K.NODE_LOST, None), past(3, K.NODE_LOST, 5)).not_before == NOW + 10


def test_progress_of_a_foreign_script_is_time_trained() -> None:
    limit = [past(n, K.TIME_LIMIT, None, trained=300.0) for n in range(1, 30)]
    assert after(*limit, steps_known=False).reason == "continues after time_limit"
    cut = [past(n, K.TIME_LIMIT, None, trained=299.0) for n in range(1, 30)]
    assert after(*cut, steps_known=False).action is Action.FAIL
    taken = [past(n, K.PREEMPTED, None, ago=30.0 - n, trained=3.0) for n in range(1, 30)]
    assert after(*taken, steps_known=False).action is Action.HOLD
    assert after(*taken[-2:], steps_known=False).not_before == NOW + 20.0
    short = [past(n, K.RANK_KILLED, None, trained=60.0) for n in range(10)]
    assert after(*short, steps_known=False).action is Action.FAIL
    long = [past(n, K.RANK_KILLED, None, trained=86400.0) for n in range(30)]
    assert "rank killed once" in after(*long, steps_known=False).reason


@pytest.mark.parametrize(
    ("seconds_ago", "holds_after"),
    [
        ((3600, 0), "1970-01-13 12:46:40Z"),
        ((-3600, 0), "1970-01-13 13:46:40Z"),  # set back: the gap counts for nothing
        ((0, 3600, 0), "1970-01-13 12:46:40Z"),
        ((1, 3600, 0), "1970-01-13 13:46:39Z"),  # set back and right again: not longer than the whole
    ],
)
def test_an_outage_lasts_no_longer_when_the_clock_is_set(seconds_ago: tuple[int, ...], holds_after: str) -> None:
    decision = after(*(past(n, K.JOB_LOST, None, ago=ago / 3600) for n, ago in enumerate(seconds_ago)))
    assert f"; holds after {holds_after} unless" in decision.reason


@pytest.mark.parametrize(
    ("saved", "counted", "action"),
    [
        ((0,), "once", Action.HOLD),
        ((1,), "once", Action.RETRY),
        ((5, 10, 7), "2 times", Action.HOLD),
        ((5, 10, 10), "2 times", Action.HOLD),
        ((5, 10, 11), "once", Action.RETRY),
    ],
)
def test_progress_is_a_checkpoint_newer_than_all_before_it(
    saved: tuple[int, ...], counted: str, action: Action
) -> None:
    history = [past(n, K.RANK_KILLED, step) for n, step in enumerate(saved)]
    assert f"rank killed {counted} without a new checkpoint" in after(*history).reason
    # Out of memory is tried again after progress only.
    out_of_memory = Failure(kind=K.OUT_OF_MEMORY, reason="its reason")
    assert after(*history[:-1], replace(history[-1], failure=out_of_memory)).action is action


def test_a_script_that_never_worked_is_counted_in_tries() -> None:
    wrong = [past(n, K.LAUNCH_FAILED, None, started=False, first=True, script=True) for n in range(1, 11)]
    decision = after(*wrong[:9])
    assert decision.action is Action.RETRY
    assert "launch failed 9 times without a new checkpoint (try 9 of 10)" in decision.reason
    decision = after(*wrong)
    assert decision.action is Action.FAIL
    assert "recovery.max_failures is spent; the last one: its reason; see the job's log" in decision.reason
    # A job that Slurm itself could not launch is an outage, whatever the script did before.
    assert "launch failed once; holds" in after(*wrong, past(11, K.LAUNCH_FAILED, None, started=False)).reason


def test_an_outage_is_counted_by_gaps_of_two_hours_at_most() -> None:
    # 24 failures, 100 minutes apart, are an outage of 38 hours; ten, three hours apart, one of 18.
    def hours(times: int, gap: float) -> Action:
        return after(*[past(n, K.NODE_LOST, None, ago=gap * (times - 1 - n)) for n in range(times)]).action

    assert hours(24, 100 / 60) is Action.HOLD
    assert hours(10, 3.0) is Action.RETRY
    assert hours(12, 3.0) is Action.RETRY
    assert hours(13, 3.0) is Action.HOLD


def test_steps_are_known_by_default() -> None:
    history = [past(1, K.PREEMPTED, None, trained=86400.0)]
    assert "preempted once; holds after" in decide(history, CONFIG, NOW, 1.0, run="tiny-1").reason
    assert after(*history, steps_known=False).reason == "continues after preempted"


def test_reason_of_a_cancel_names_the_newest_checkpoint() -> None:
    assert after_cancel(None).reason == "cancelled by `orch cancel`; no checkpoint is known"
    assert after_cancel(40).reason == "cancelled by `orch cancel`; the newest checkpoint has step 40"
    lost = "cancelled by `orch cancel`; the newest checkpoint had step 40, and its folder is gone"
    assert after_cancel(40, "its folder is gone").reason == lost
    assert after_cancel(None).action is Action.CANCEL


attempts = st.builds(
    past, st.just(1), st.sampled_from(list(FailureKind)), st.none() | st.integers(0, 50), started=st.booleans()
)
histories = st.lists(attempts, min_size=1, max_size=30)


@given(histories, st.floats(0, 1, exclude_max=True), st.booleans())
def test_every_decision_has_a_reason_and_a_pause_within_bounds(
    history: list[EndedAttempt], jitter: float, steps_known: bool
) -> None:
    decision = after(*history, jitter=jitter, steps_known=steps_known)
    assert decision.reason
    assert decision.action in (Action.RETRY, Action.FAIL, Action.HOLD)
    if decision.action is Action.RETRY:
        assert NOW <= decision.not_before <= NOW + CONFIG.backoff_max
    assert json.loads(json.dumps(decision.to_json())) == {
        "action": str(decision.action),
        "reason": decision.reason,
        "not_before": decision.not_before,
        "exclude": list(decision.exclude),
    }


COUNTED = [kind for kind in FailureKind if TRAITS[kind].budget not in (Budget.PERSON, Budget.NOTHING)]


@given(histories, st.sampled_from(COUNTED))
def test_attempts_without_progress_end_the_run(history: list[EndedAttempt], kind: FailureKind) -> None:
    stuck = [past(n, kind, None, ago=25.0 - n) for n in range(25)]
    assert after(*history, *stuck).action in (Action.HOLD, Action.FAIL)


@given(histories, st.sampled_from([kind for kind in FailureKind if TRAITS[kind].budget is not Budget.PERSON]))
def test_progress_restores_every_budget(history: list[EndedAttempt], kind: FailureKind) -> None:
    assert after(*history, past(99, kind, 1000)).action is Action.RETRY


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_by_half_at_most(row: int, jitter: float) -> None:
    assert (
        backoff_seconds(row, CONFIG, 1.0) / 2
        <= backoff_seconds(row, CONFIG, jitter)
        <= backoff_seconds(row, CONFIG, 1.0)
        <= CONFIG.backoff_max
    )


def test_a_requested_drill_uses_up_nothing() -> None:
    real = [past(n, K.RANK_KILLED, None) for n in range(CONFIG.max_failures - 1)]
    drill = past(50, K.NODE_LOST, None, drill="kill-node")
    decision = after(*real, drill)
    assert (decision.action, decision.not_before) == (Action.RETRY, NOW)
    assert decision.reason == "continues after a drill, which uses no budget: its reason"
    again = after(*real, drill, drill, past(60, K.NODE_LOST, None))
    assert "node lost once" in again.reason


def test_drill_of_a_final_failure_holds_the_run() -> None:
    assert after(past(1, K.DESYNC, 10, drill="stop-rank")).action is Action.HOLD


def test_between_two_failures_two_hours_count_at_most():
    for failures, hours, action in ((13, 2.0, Action.HOLD), (13, 90.0, Action.HOLD), (12, 90.0, Action.RETRY)):
        row = outage(K.NODE_LOST, hours * (failures - 1), failures)
        assert after(*row).action is action, (failures, hours)


@pytest.mark.parametrize(
    ("kind", "trained", "is_progress"),
    [(K.RANK_KILLED, 1799.0, False), (K.RANK_KILLED, 1800.0, True), (K.PREEMPTED, 299.0, False),
     (K.PREEMPTED, 300.0, True)],
)  # fmt: skip
def test_an_attempt_of_a_command_that_lasted_counts_as_progress(kind: FailureKind, trained: float, is_progress: bool):
    row = [
        *(past(n, K.RANK_KILLED, None) for n in range(9)),
        past(9, kind, None, trained=trained),
        past(10, K.RANK_KILLED, None),
    ]
    found = after(*row, steps_known=False)
    assert (found.action is Action.RETRY) == is_progress


@pytest.mark.parametrize(
    ("kind", "seconds", "step", "counts"),
    [
        (K.RANK_KILLED, 1799.0, 1, False),
        (K.RANK_KILLED, 1800.0, 1, True),
        (K.RANK_KILLED, 5.0, 40, True),
        (K.RANK_KILLED, 0.0, 40, False),
        (K.PREEMPTED, 299.0, 1, False),
        (K.PREEMPTED, 300.0, 1, True),
    ],
)
def test_a_checkpoint_whose_step_is_not_higher_counts_by_time_or_by_the_programs_own_step(
    kind: FailureKind, seconds: float, step: int, counts: bool
) -> None:
    later = [past(n, kind, 1, ago=2, saved_after=seconds, step=step + n) for n in range(2, 12)]
    history = [past(1, kind, 1, ago=50, step=30), *later]
    decision = after(*history)
    assert (decision.action is Action.RETRY) is (counts or kind is K.PREEMPTED), decision.reason
    free = counts and kind is K.PREEMPTED
    assert decision.reason.startswith("continues after preempted" if free else f"{str(kind).replace('_', ' ')} ")
    hint = "saved under steps no higher than before, which counts as progress only half an hour after a start"
    assert (hint in decision.reason) is (seconds > 0 and not counts)


LOST = Failure(kind=FailureKind.NODE_LOST, reason="NODE_FAIL", node="n2")


def drilled(kind: str, attempt: int = 1, generation: int = 2) -> Notice:
    return Notice(
        run="r", attempt=attempt, source="agent-0001", seq=1, kind=EventKind.DRILL, generation=generation, time=1.0,
        node="n2", data={"kind": kind, "rank": None},
    )  # fmt: skip


@pytest.mark.parametrize(("notices", "drill"), [
    ([drilled("kill-node")], "kill-node"),
    ([drilled("slow-rank")], ""),
    ([drilled("kill-node", generation=1)], ""),
    ([drilled("kill-node", attempt=2)], ""),
    ([], ""),
])  # fmt: skip
def test_failure_of_a_drilled_generation_names_the_drill(notices: list[Notice], drill: str) -> None:
    found = attribute_drill(LOST, notices, 1, 2)
    assert found is not None
    assert found.drill == drill
    assert drill_words(found.to_json()) == (f" (drill {drill})" if drill else "")


def test_failure_that_no_drill_causes_is_unchanged() -> None:
    limit = Failure(kind=FailureKind.TIME_LIMIT, reason="the time limit")
    assert attribute_drill(limit, [drilled("kill-node")], 1, 2) is limit
    assert attribute_drill(None, [drilled("kill-node")], 1, 2) is None
