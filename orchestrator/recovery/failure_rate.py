"""Failure rates of runs, used to plan saves, and of nodes, used to avoid bad nodes. Pure.

A run's failures are modelled as a Poisson process with one rate per node and a gamma prior. The posterior mean after n
failures in t node-seconds is (a + n) / (b + t).

A node's failures lose half their weight every HALF_LIFE, so two within hours weigh more than two within a month. Node
rates are modelled as gamma distributed around the cluster's rate (shape SPREAD); the rate of a node with n failures in
t seconds is then gamma distributed with shape SPREAD + n and rate SPREAD / (cluster rate) + t.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.registry.records import Attempt, Generation
from trainer.protocol.failures.outcome import Failure, FailureKind, Losses, NodeBlame, select_kinds

DAY = 86400.0
WINDOW = 90 * DAY  # seconds of a run's history; older attempts say little about the current cluster
_TRUST_IN_CLUSTER = 4.0
"""Maximum weight of the cluster's history, in failures. It is limited because runs stress different components."""
_CLUSTER_KINDS = select_kinds(lambda traits: traits.losses is Losses.CLUSTER)
_RUN_KINDS = select_kinds(lambda traits: traits.losses is not Losses.NOBODY)  # ends that lose unsaved work


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Number of failures, and the node-seconds in which they occurred."""

    failures: int = 0
    node_seconds: float = 0.0


def count_failures(
    attempts: Iterable[Attempt], failed_generations: Iterable[Generation], now: float, run: str
) -> tuple[FailureCount, FailureCount]:
    """Return the counts of the cluster's other runs and of this run, from started attempts and failed generations.

    An attempt's own failure counts if work was lost and its last generation has no failure, because the node died with
    its agent.
    """
    by_attempt: dict[tuple[str, int], dict[int, FailureKind]] = {}
    for generation in failed_generations:
        assert generation.failure is not None
        kinds = by_attempt.setdefault((generation.run, generation.attempt), {})
        kinds[generation.number] = FailureKind(generation.failure["kind"])
    counts = {True: FailureCount(), False: FailureCount()}
    for attempt in attempts:
        kinds = by_attempt.get((attempt.run, attempt.number), {})
        failures = list(kinds.values())
        saved, last = attempt.saved_step, attempt.last_step
        lost_work = last is None or saved is None or saved < last  # a preempted job that saved has lost nothing
        if attempt.failure and attempt.generations not in kinds and lost_work:
            failures.append(FailureKind(attempt.failure["kind"]))
        began, ended = attempt.started_at, attempt.ended_at
        seconds = max(0.0, (now if ended is None else ended) - (now if began is None else began))
        is_own = attempt.run == run
        count, counted = counts[is_own], _RUN_KINDS if is_own else _CLUSTER_KINDS
        counts[is_own] = FailureCount(
            failures=count.failures + sum(kind in counted for kind in failures),
            node_seconds=count.node_seconds + max(1, len(attempt.nodes)) * seconds,
        )
    return counts[False], counts[True]


def time_between_failures(nodes: int, *, node_days: float, cluster: FailureCount, run: FailureCount) -> float:
    """Return the mean seconds between failures of a job on `nodes` nodes.

    The prior is one failure per `node_days` node-days (64: a job of 64 nodes fails once a day; published rates for
    large clusters lie between 42 and 427). The cluster's history updates it, then the run's own.
    """
    shape, exposure = 1.0 + cluster.failures, node_days * DAY + cluster.node_seconds
    weight = min(1.0, _TRUST_IN_CLUSTER / shape)
    rate = (weight * shape + run.failures) / (weight * exposure + run.node_seconds)
    return 1.0 / (rate * nodes)


HALF_LIFE = 7 * DAY  # half of the faults that follow a node's repair occur within a week
NODE_WINDOW = 60 * DAY
SPREAD = 0.4
"""Inverse of the dispersion of faults per node (2.5) in one year of 400 nodes (stepfun-ai/InfiniteHBD-Trace)."""
TIMES, SURE = 2.0, 0.75  # a node is avoided if its rate is TIMES the cluster's with confidence SURE ...
BY_CHANCE = 0.3
"""... and if the probability of its failures, at the others' rate, is below this."""

NODE_LOCAL = select_kinds(lambda traits: traits.blame is NodeBlame.NODE)
"""Failure kinds that are conclusive evidence against the node they name."""
WEAK = select_kinds(lambda traits: traits.blame is NodeBlame.WEAK)
"""Failure kinds that are evidence against a node only if they recur."""


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """Failures and job time of one node, or of several combined, within the last NODE_WINDOW seconds."""

    failed: tuple[float, ...] = ()  # seconds ago, newest first
    seconds: float = 0.0  # seconds spent in jobs
    recent_seconds: float = 0.0  # `seconds` with the same decay as failures


def histories(attempts: Iterable[Attempt], replaced: Iterable[tuple[str, float]], now: float) -> dict[str, NodeHistory]:
    """Return the histories by node, from started attempts and from nodes that spares replaced (name, time).

    Failures caused by drills or without evidence about nodes are excluded.
    """
    failed: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    recent: dict[str, float] = defaultdict(float)
    for node, at in replaced:
        failed[node].append(now - at)
    for one in attempts:
        ended = now if one.ended_at is None else one.ended_at
        began = ended if one.started_at is None else one.started_at
        for node in one.nodes:
            seconds[node] += max(0.0, ended - began)
            recent[node] += _decayed_span(now - began, now - ended)
        failure = Failure.from_json(one.failure) if one.failure else None
        if failure is not None and counts(failure):
            for node in failure.nodes:
                failed[node].append(now - ended)
    return {
        node: NodeHistory(failed=tuple(sorted(failed[node])), seconds=seconds[node], recent_seconds=recent[node])
        for node in sorted(failed.keys() | seconds.keys())
    }


def counts(failure: Failure) -> bool:
    """Return whether the failure is evidence about the nodes that it names."""
    return failure.kind in NODE_LOCAL | WEAK and not failure.drill


def of_others(known: dict[str, NodeHistory], node: str) -> NodeHistory:
    """Return the combined history of all nodes except one."""
    rest = [history for name, history in known.items() if name != node]
    return NodeHistory(
        failed=tuple(age for history in rest for age in history.failed),
        seconds=sum(history.seconds for history in rest),
        recent_seconds=sum(history.recent_seconds for history in rest),
    )


def is_worse(node: NodeHistory, others: NodeHistory, node_days: float) -> bool:
    """Return whether the node fails more often than others; `node_days`: prior node-days between failures."""
    rate = (1 + len(others.failed)) / (node_days * DAY + others.seconds)
    weight = sum(_decay_weight(age) for age in node.failed)
    chance = _gamma_tail(SPREAD + weight, TIMES * (SPREAD + rate * node.recent_seconds))
    return chance >= SURE and _chance_probability(node, others) < BY_CHANCE


def _chance_probability(node: NodeHistory, others: NodeHistory) -> float:
    """Return the probability of at least this many failures on the node, if failures are proportional to job time."""
    most, total = len(node.failed), len(node.failed) + len(others.failed)
    if not node.seconds > 0.0 or not others.seconds:
        return 0.0  # no basis for a comparison
    whole = node.seconds + others.seconds
    here, there = math.log(node.seconds / whole), math.log(others.seconds / whole)
    ways = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(most, total + 1)]
    return sum(math.exp(way + k * here + (total - k) * there) for k, way in enumerate(ways, most))


def _decayed_span(began: float, ended: float) -> float:
    """Return the length in seconds, decayed by HALF_LIFE, of a span between two ages (seconds ago)."""
    unit = HALF_LIFE / math.log(2)
    return unit * (_decay_weight(ended) - _decay_weight(max(began, ended)))


def _decay_weight(age: float) -> float:
    return math.pow(0.5, max(0.0, age) / HALF_LIFE)


def _gamma_tail(shape: float, x: float) -> float:
    """Return the probability that a gamma variate (scale 1) exceeds x, by the series of DLMF 8.11.4."""
    term = total = 1.0 / shape
    k = 0
    while term > total * 1e-12:
        k += 1
        term *= x / (shape + k)
        total += term
    return 1.0 - total * math.exp(shape * math.log(x) - x - math.lgamma(shape)) if x > 0 else 1.0
