"""PURE: whether a node fails more often than the others of its cluster, from its failures and its time in jobs.

A failure counts half after HALF_LIFE, so two within hours say more than two within a month. The rates of the nodes of
a cluster are taken for gamma distributed around the cluster's (shape SPREAD); a node with n failures in t seconds then
has a rate distributed as gamma with shape SPREAD + n and rate SPREAD / (the cluster's) + t.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.registry.records import Attempt
from trainer.contract.failures.outcome import Blame, Failure, kinds_with

DAY = 86400.0
HALF_LIFE = 7 * DAY
"""Half of the faults that follow a repair of their node come within a week."""
WINDOW = 60 * DAY
SPREAD = 0.4
"""1 / the dispersion of faults per node (2.5) in a year's records of 400 nodes (stepfun-ai/InfiniteHBD-Trace)."""
TIMES, SURE = 2.0, 0.75
"""A node is avoided when its rate is so many times the cluster's, with so much confidence ..."""
BY_CHANCE = 0.3
"""... and nodes as good as the others would have had as many of the failures with less chance than this."""

NODE_LOCAL = kinds_with(lambda traits: traits.blame is Blame.NODE)
"""Kinds that blame the node by themselves, when they name one."""
WEAK = kinds_with(lambda traits: traits.blame is Blame.WEAK)
"""Kinds that only happened on a node: one of them is no evidence."""


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """What one node, or several together, did in jobs of the last WINDOW seconds."""

    failed: tuple[float, ...] = ()  # seconds ago, the newest first
    seconds: float = 0.0  # in jobs
    recent_seconds: float = 0.0  # the same, as much decayed as failures are

    def again(self) -> "NodeHistory":
        """The same with one more failure, now."""
        return replace(self, failed=(0.0, *self.failed))

    def newest(self, count: int) -> "NodeHistory":
        """The same with so many of its failures at most."""
        return replace(self, failed=self.failed[:count])


def histories(attempts: Iterable[Attempt], replaced: Iterable[tuple[str, float]], now: float) -> dict[str, NodeHistory]:
    """By node: from attempts that have run, and the nodes that spares have replaced, with the time of that.

    Failures that a drill brought about, or that tell nothing of a node, are left out.
    """
    failed: dict[str, list[float]] = {}
    for node, at in replaced:
        failed.setdefault(node, []).append(now - at)
    seconds: dict[str, float] = {}
    recent: dict[str, float] = {}
    for one in attempts:
        ended = now if one.ended_at is None else one.ended_at
        began = ended if one.started_at is None else one.started_at
        for node in one.nodes:
            seconds[node] = seconds.get(node, 0.0) + max(0.0, ended - began)
            recent[node] = recent.get(node, 0.0) + _decayed_span(now - began, now - ended)
        failure = Failure.from_json(one.failure) if one.failure else None
        if failure is not None and counts(failure):
            for node in failure.nodes:
                failed.setdefault(node, []).append(now - ended)
    return {
        node: NodeHistory(
            failed=tuple(sorted(failed.get(node, ()))),
            seconds=seconds.get(node, 0.0),
            recent_seconds=recent.get(node, 0.0),
        )
        for node in sorted(failed.keys() | seconds.keys())
    }


def counts(failure: Failure) -> bool:
    """Whether it tells something of the nodes that it names."""
    return failure.kind in NODE_LOCAL | WEAK and not failure.drill


def of_others(known: dict[str, NodeHistory], node: str) -> NodeHistory:
    """All nodes but one together."""
    rest = [history for name, history in known.items() if name != node]
    return NodeHistory(
        failed=tuple(age for history in rest for age in history.failed),
        seconds=sum(history.seconds for history in rest),
        recent_seconds=sum(history.recent_seconds for history in rest),
    )


def is_worse(node: NodeHistory, others: NodeHistory, node_days: float) -> bool:
    """Whether the node fails more often than others; `node_days`: of a node between failures, as a first estimate."""
    rate = (1 + len(others.failed)) / (node_days * DAY + others.seconds)
    weight = sum(_left(age) for age in node.failed)
    chance = _above(SPREAD + weight, TIMES * (SPREAD + rate * node.recent_seconds))
    return chance >= SURE and _by_chance(node, others) < BY_CHANCE


def _by_chance(node: NodeHistory, others: NodeHistory) -> float:
    """The chance of as many failures on this node, or more, if failures fell on all nodes alike, by time in jobs."""
    most, total = len(node.failed), len(node.failed) + len(others.failed)
    if not node.seconds > 0.0 or not others.seconds:
        return 0.0  # nothing to compare with
    here, there = (
        math.log(node.seconds / (node.seconds + others.seconds)),
        math.log(others.seconds / (node.seconds + others.seconds)),
    )
    ways = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(most, total + 1)]
    return sum(math.exp(way + k * here + (total - k) * there) for k, way in enumerate(ways, most))


def _decayed_span(began: float, ended: float) -> float:
    """Seconds between two ages (seconds ago), each of which counts half after HALF_LIFE."""
    unit = HALF_LIFE / math.log(2)
    return unit * (_left(ended) - _left(max(began, ended)))


def _left(age: float) -> float:
    """What still counts of something that happened so many seconds ago."""
    return math.pow(0.5, max(0.0, age) / HALF_LIFE)


def _above(shape: float, x: float) -> float:
    """The chance that a gamma distributed value (scale 1) is above x: one minus the series of DLMF 8.11.4."""
    term = total = 1.0 / shape
    k = 0
    while term > total * 1e-12:
        k += 1
        term *= x / (shape + k)
        total += term
    return 1.0 - total * math.exp(shape * math.log(x) - x - math.lgamma(shape)) if x > 0 else 1.0
