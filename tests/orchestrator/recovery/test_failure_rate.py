"""Expected failure rates of runs and of nodes, on tables."""

from collections.abc import Sequence

import pytest

from orchestrator.recovery import failure_rate
from orchestrator.recovery.failure_rate import (
    FailureCount,
    NodeHistory,
    count_failures,
    histories,
    is_worse,
    of_others,
    time_between_failures,
)
from orchestrator.registry.records import Attempt, Generation
from orchestrator.states import AttemptState
from trainer.protocol.failures.outcome import Failure, FailureKind

NOTHING, DAY = FailureCount(), 86_400.0


@pytest.mark.parametrize(("nodes", "days"), [(64, 1.0), (1, 64.0), (16, 4.0), (1024, 0.0625)])
def test_to_begin_with_a_job_of_64_nodes_fails_once_a_day(nodes, days):
    found = time_between_failures(nodes, node_days=64.0, cluster=NOTHING, run=NOTHING)
    assert found == pytest.approx(days * DAY)


def test_experience_outweighs_the_prior():
    good = FailureCount(failures=9, node_seconds=9 * 400 * DAY)  # one failure in 400 node-days
    assert time_between_failures(1, node_days=64.0, cluster=good, run=NOTHING) == pytest.approx(366.4 * DAY)
    bad = FailureCount(failures=99, node_seconds=100 * DAY)
    assert time_between_failures(1, node_days=64.0, cluster=bad, run=NOTHING) == pytest.approx(1.64 * DAY)


def test_a_quiet_cluster_is_trusted_more_with_time():
    found = [
        time_between_failures(8, node_days=64.0, cluster=FailureCount(node_seconds=days * DAY), run=NOTHING)
        for days in (0, 10, 100, 1000)
    ]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(133 * DAY)


def test_the_runs_own_failures_weigh_more_than_the_clusters():
    cluster = FailureCount(failures=10, node_seconds=1000 * DAY)
    run = FailureCount(failures=12, node_seconds=0.5 * DAY)
    alone = time_between_failures(1, node_days=64.0, cluster=cluster, run=NOTHING)
    found = time_between_failures(1, node_days=64.0, cluster=cluster, run=run)
    assert alone == pytest.approx(96.7 * DAY, rel=0.01)
    assert found < alone / 3.5


def attempt(number: int, run: str = "mine", **fields) -> Attempt:
    usual = {"state": AttemptState.ENDED, "nonce": "n", "job_name": f"{run}-{number}", "nodes": ("a", "b")}
    return Attempt(**{"run": run, "number": number, **usual, "started_at": 0.0, "ended_at": 100.0, **fields})


def generation(attempt: int, number: int, kind: FailureKind, run: str = "mine") -> Generation:
    return Generation(run=run, attempt=attempt, number=number, started_at=0.0, failure={"kind": kind, "reason": "?"})


def test_attempts_and_their_generations_are_counted_once():
    killed, lost = FailureKind.RANK_KILLED, FailureKind.NODE_LOST
    attempts = [
        attempt(1, generations=3, failure={"kind": str(killed), "reason": "?"}),
        attempt(2, generations=1, failure={"kind": str(lost), "reason": "?"}, last_step=9, saved_step=5),
        attempt(3, generations=1, ended_at=None),
        attempt(1, "other", nodes=("c",)),
    ]
    failed_generations = [generation(1, 1, killed), generation(1, 3, killed)]
    cluster, own = count_failures(attempts, failed_generations, 150.0, "mine")
    assert (cluster, own) == (FailureCount(node_seconds=100.0), FailureCount(failures=3, node_seconds=700.0))


def failed(kind: FailureKind, number: int = 1, run: str = "mine", **fields) -> Attempt:
    return attempt(number, run, failure={"kind": str(kind), "reason": "?"}, **fields)


@pytest.mark.parametrize(("saved", "counted"), [(9, 0), (5, 1), (None, 1)])
def test_preemption_counts_only_if_work_was_lost(saved, counted):
    preempted = failed(FailureKind.PREEMPTED, last_step=9, saved_step=saved)
    assert count_failures([preempted], [], 0.0, "mine")[1].failures == counted


@pytest.mark.parametrize(
    ("kind", "of_cluster", "of_run"),
    [
        (FailureKind.NODE_LOST, 1, 1),
        (FailureKind.USER_ERROR, 0, 1),
        (FailureKind.TIME_LIMIT, 0, 0),
        (FailureKind.CANCELLED, 0, 0),
        (FailureKind.STORAGE, 0, 0),
    ],
)
def test_kinds_count_for_the_run_and_for_the_cluster(kind, of_cluster, of_run):
    cluster, own = count_failures([failed(kind, run=run) for run in ("mine", "other")], [], 0.0, "mine")
    assert (cluster.failures, own.failures) == (of_cluster, of_run)
    assert failure_rate.WINDOW == 90 * DAY


def test_time_counts_by_nodes_and_never_negatively_after_a_clock_change():
    four = ("a", "b", "c", "d")
    attempts = [
        attempt(1, nodes=four, ended_at=0.25),
        failed(FailureKind.NODE_LOST, 2, nodes=four, ended_at=-50.0),
        attempt(1, "other", ended_at=3.0),
    ]
    others, own = count_failures(attempts, [], 9.0, "mine")
    assert (others.node_seconds, own.node_seconds) == (6.0, 1.0)
    assert (others.failures, own.failures) == (0, 1)


# -- nodes: two failures within hours are stronger evidence than two within a month

HOUR, NOW = 3600.0, 1e9
NODE_DAYS = 64.0
IDLE = NodeHistory()


def node_attempt(
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
    (one,) = histories([node_attempt(1, ["n1"], days, 0.0)], [("n1", NOW - age * DAY) for age in ages], NOW).values()
    return one


@pytest.mark.parametrize(
    ("ages", "days", "worse"),
    [
        ((0.0,), 0.1, False),
        ((0.0, 0.125), 0.125, True),
        ((0.0, 1.0), 1.0, True),
        ((0.0, 3.0), 3.0, True),
        ((0.0, 0.125), 60.0, True),  # a long good record does not help
        ((0.0, 7.0), 7.0, False),
        ((0.0, 30.0), 30.0, False),
        ((0.0, 5.0, 10.0), 10.0, True),
    ],
)
def test_failures_count_by_how_recent_they_are(ages: tuple[float, ...], days: float, worse: bool) -> None:
    others = NodeHistory(seconds=3 * days * DAY, recent_seconds=3 * days * DAY)
    assert is_worse(history(*ages, days=days), others, NODE_DAYS) is worse


def test_a_node_whose_peers_fail_as_often_is_no_worse() -> None:
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


def test_ends_without_evidence_about_nodes_are_not_counted() -> None:
    ended = [
        node_attempt(1, ["n1", "n2"], 5.0, 4.0, died("n1")),
        node_attempt(2, ["n1", "n2"], 4.0, 3.0, died("n1", FailureKind.USER_ERROR)),
        node_attempt(3, ["n1", "n2"], 3.0, 2.0, died("n1", drill="kill-rank")),
        node_attempt(4, ["n1", "n3"], 2.0, 1.0, died("n1", FailureKind.NODE_LOST)),
        node_attempt(5, ["n2"], 1.0, 0.0, died("n1", FailureKind.PREEMPTED)),
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


def test_job_time_of_a_node_starts_at_zero() -> None:
    ran = Attempt(
        run="r-1", number=1, state=AttemptState.ENDED, nonce="n", job_name="j", nodes=("n1",),
        started_at=NOW - HOUR, ended_at=NOW - HOUR,
    )  # fmt: skip
    assert histories([ran], [], NOW) == {"n1": NodeHistory(failed=(), seconds=0.0, recent_seconds=0.0)}
    failed_only = histories([], [("n2", NOW - HOUR)], NOW)
    assert failed_only == {"n2": NodeHistory(failed=(HOUR,), seconds=0.0, recent_seconds=0.0)}


def test_thousands_of_failures_do_not_overflow() -> None:
    node = NodeHistory(failed=(0.0,) * 5000, seconds=DAY, recent_seconds=DAY)
    assert is_worse(node, NodeHistory(failed=(0.0,) * 20000, seconds=10 * DAY), NODE_DAYS)
    assert not is_worse(node, NodeHistory(failed=(0.0,) * 80000, seconds=10 * DAY), NODE_DAYS)


def test_job_time_never_shrinks_after_a_clock_change() -> None:
    found = histories([node_attempt(1, ["n1"], 0.0, 1.0), node_attempt(2, ["n1"], 3.0, 1.0)], [], NOW)
    assert found["n1"].seconds == pytest.approx(2 * DAY)
    assert 0.0 < found["n1"].recent_seconds < 2 * DAY
