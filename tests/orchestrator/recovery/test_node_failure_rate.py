"""Two failures within hours tell more of a node than two within a month, and nothing where all nodes fail alike."""

from collections.abc import Sequence

import pytest

from orchestrator.recovery.node_failure_rate import NodeHistory, histories, is_worse, of_others
from orchestrator.registry.records import Attempt
from orchestrator.states import AttemptState
from trainer.protocol.failures.outcome import Failure, FailureKind

HOUR, DAY, NOW = 3600.0, 86400.0, 1e9
NODE_DAYS = 64.0
IDLE = NodeHistory()


def attempt(
    number: int, nodes: Sequence[str], began: float, ended: float, failure: Failure | None = None
) -> Attempt:  # times in days ago
    return Attempt(
        run="r-1", number=number, state=AttemptState.ENDED, nonce="n", job_name="j", nodes=tuple(nodes),
        started_at=NOW - began * DAY, ended_at=NOW - ended * DAY, failure=failure.to_json() if failure else None,
    )  # fmt: skip


def died(node: str, kind: FailureKind = FailureKind.RANK_KILLED, drill: str = "") -> Failure:
    return Failure(kind=kind, reason="", node=node, drill=drill)


def history(*ages: float, days: float) -> NodeHistory:
    """Failures so many days ago in so many days of jobs up to now."""
    (one,) = histories([attempt(1, ["n1"], days, 0.0)], [("n1", NOW - age * DAY) for age in ages], NOW).values()
    return one


@pytest.mark.parametrize(
    ("ages", "days", "worse"),
    [
        ((0.0,), 0.1, False),
        ((0.0, 0.125), 0.125, True),
        ((0.0, 1.0), 1.0, True),
        ((0.0, 3.0), 3.0, True),
        ((0.0, 0.125), 60.0, True),  # it has served well for long, and no more
        ((0.0, 7.0), 7.0, False),
        ((0.0, 30.0), 30.0, False),
        ((0.0, 5.0, 10.0), 10.0, True),
    ],
)
def test_failures_count_by_how_recent_they_are(ages: tuple[float, ...], days: float, worse: bool) -> None:
    others = NodeHistory(seconds=3 * days * DAY, recent_seconds=3 * days * DAY)
    assert is_worse(history(*ages, days=days), others, NODE_DAYS) is worse


def test_a_node_whose_peers_fail_as_often_is_no_worse() -> None:
    """A program that kills ranks wherever it runs is no fault of the node on which it did so twice."""
    twice = history(0.0, 0.1, days=0.1)
    elsewhere = NodeHistory(failed=(0.0,) * 6, seconds=0.4 * DAY, recent_seconds=0.4 * DAY)
    assert not is_worse(twice, elsewhere, NODE_DAYS)
    assert is_worse(twice, NodeHistory(seconds=0.4 * DAY), NODE_DAYS)


def test_where_failures_are_common_more_of_them_are_needed() -> None:
    twice = history(0.0, 2.0, days=30.0)
    calm = NodeHistory(seconds=6400 * DAY)
    rough = NodeHistory(failed=(0.0,) * 800, seconds=6400 * DAY)
    assert is_worse(twice, calm, NODE_DAYS)
    assert not is_worse(twice, rough, NODE_DAYS)


def test_what_tells_nothing_of_a_node_is_not_counted() -> None:
    ended = [
        attempt(1, ["n1", "n2"], 5.0, 4.0, died("n1")),
        attempt(2, ["n1", "n2"], 4.0, 3.0, died("n1", FailureKind.USER_ERROR)),
        attempt(3, ["n1", "n2"], 3.0, 2.0, died("n1", drill="kill-rank")),
        attempt(4, ["n1", "n3"], 2.0, 1.0, died("n1", FailureKind.NODE_LOST)),
        attempt(5, ["n2"], 1.0, 0.0, died("n1", FailureKind.PREEMPTED)),
    ]
    found = histories(ended, [("n4", NOW - DAY)], NOW)
    assert {node: [round(age / DAY) for age in one.failed] for node, one in found.items()} == {
        "n1": [1, 4], "n2": [], "n3": [], "n4": [1],
    }  # fmt: skip
    assert found["n1"].seconds == pytest.approx(4 * DAY)
    assert found["n1"].recent_seconds < found["n1"].seconds
    rest = of_others(found, "n1")
    assert (len(rest.failed), rest.seconds) == (1, pytest.approx(5 * DAY))


def test_an_attempt_that_never_ran_counts_without_time() -> None:
    never = Attempt(
        run="r-1", number=1, state=AttemptState.ENDED, nonce="n", job_name="j", nodes=("n1",), ended_at=NOW - HOUR,
        failure=died("n1", FailureKind.LAUNCH_FAILED).to_json(),
    )  # fmt: skip
    assert histories([never], [], NOW) == {"n1": NodeHistory(failed=(HOUR,))}


def test_time_that_a_node_was_in_jobs_is_counted_from_nothing() -> None:
    ran = Attempt(
        run="r-1", number=1, state=AttemptState.ENDED, nonce="n", job_name="j", nodes=("n1",),
        started_at=NOW - HOUR, ended_at=NOW - HOUR,
    )  # fmt: skip
    assert histories([ran], [], NOW) == {"n1": NodeHistory(failed=(), seconds=0.0, recent_seconds=0.0)}
    failed_only = histories([], [("n2", NOW - HOUR)], NOW)
    assert failed_only == {"n2": NodeHistory(failed=(HOUR,), seconds=0.0, recent_seconds=0.0)}


def test_only_the_newest_failures_count_after_a_release() -> None:
    assert history(0.0, 1.0, 2.0, days=2.0).newest(1).failed == (0.0,)
    assert history(1.0, days=2.0).newest(0).add_failure().failed == (0.0,)


def test_many_thousands_of_failures_are_no_overflow() -> None:
    node = NodeHistory(failed=(0.0,) * 5000, seconds=DAY, recent_seconds=DAY)
    assert is_worse(node, NodeHistory(failed=(0.0,) * 20000, seconds=10 * DAY), NODE_DAYS)
    assert not is_worse(node, NodeHistory(failed=(0.0,) * 80000, seconds=10 * DAY), NODE_DAYS)


def test_a_clock_that_was_set_back_takes_no_time_away() -> None:
    found = histories([attempt(1, ["n1"], 0.0, 1.0), attempt(2, ["n1"], 3.0, 1.0)], [], NOW)
    assert found["n1"].seconds == pytest.approx(2 * DAY)
    assert 0.0 < found["n1"].recent_seconds < 2 * DAY
