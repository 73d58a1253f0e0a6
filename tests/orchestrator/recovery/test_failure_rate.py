"""How often a run is expected to fail, on tables."""

import pytest

from orchestrator.recovery import failure_rate
from orchestrator.recovery.failure_rate import (
    AttemptSpan,
    FailureCount,
    attempt_spans,
    count_failures,
    time_between_failures,
)
from orchestrator.registry.records import Attempt, Generation
from orchestrator.states import AttemptState
from trainer.protocol.failures.outcome import FailureKind

NOTHING, DAY = FailureCount(), 86_400.0


@pytest.mark.parametrize(
    ("nodes", "days"),
    [(64, 1.0), (1, 64.0), (16, 4.0), (1024, 0.0625)],
)
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
    """A thousand quiet node-days of others do not hide that this run dies every hour."""
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
    found = attempt_spans(attempts, failed_generations, now=150.0)
    assert [(one.seconds, one.nodes, one.failures) for one in found] == [
        (100.0, 2, (killed, killed)),
        (100.0, 2, (lost,)),
        (150.0, 2, ()),
        (100.0, 1, ()),
    ]
    cluster, own = count_failures(found, "mine")
    assert (cluster, own) == (FailureCount(node_seconds=100.0), FailureCount(failures=3, node_seconds=700.0))


@pytest.mark.parametrize(("saved", "counts"), [(9, 0), (5, 1), (None, 1)])
def test_a_preemption_counts_only_when_work_was_lost(saved, counts):
    preempted = {"kind": str(FailureKind.PREEMPTED), "reason": "?"}
    (found,) = attempt_spans([attempt(1, failure=preempted, last_step=9, saved_step=saved)], [], now=0.0)
    assert len(found.failures) == counts


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
def test_what_counts_as_a_failure(kind, of_cluster, of_run):
    cluster, own = count_failures(
        [AttemptSpan(run=run, nodes=1, seconds=1.0, failures=(kind,)) for run in ("mine", "other")], "mine"
    )
    assert (cluster.failures, own.failures) == (of_cluster, of_run)
    assert failure_rate.WINDOW == 90 * DAY


def test_time_counts_by_nodes_and_a_clock_that_was_set_back_takes_none_away():
    spans = [
        AttemptSpan(run="mine", nodes=4, seconds=0.25, failures=()),
        AttemptSpan(run="mine", nodes=4, seconds=-50.0, failures=(FailureKind.NODE_LOST,)),
        AttemptSpan(run="other", nodes=2, seconds=3.0, failures=()),
    ]
    others, own = count_failures(spans, "mine")
    assert (others.node_seconds, own.node_seconds) == (6.0, 1.0)
    assert (others.failures, own.failures) == (0, 1)
