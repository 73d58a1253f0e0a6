"""Failure rate of a run of this size, from its cluster's and its own history; the job plans its saves by it. Pure.

Failures are modelled as a Poisson process with one rate per node and a gamma prior. The posterior mean after n failures
in t node-seconds is (a + n) / (b + t).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.registry.records import Attempt, Generation
from trainer.protocol.failures.outcome import FailureKind, Losses, select_kinds

DAY = 86400.0
WINDOW = 90 * DAY
"""Seconds of history; older attempts carry little information about the present cluster."""


_TRUST_IN_CLUSTER = 4.0
"""Maximum weight of the cluster's history, in failures: runs differ in the components they stress."""


_OF_THE_CLUSTER = select_kinds(lambda traits: traits.losses is Losses.CLUSTER)
_OF_A_RUN = select_kinds(lambda traits: traits.losses is not Losses.NOBODY)
"""Ends that lose unsaved work."""


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """Attempt in the failure statistics: its run, nodes, duration and failures."""

    run: str
    nodes: int
    seconds: float
    failures: tuple[FailureKind, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Number of failures within a number of node-seconds."""

    failures: int = 0
    node_seconds: float = 0.0


def attempt_spans(
    attempts: Iterable[Attempt], failed_generations: Iterable[Generation], now: float
) -> list[AttemptSpan]:
    """Return the started attempts with their failures and those of their generations.

    `failed_generations` holds the generations that failed. An attempt's own failure counts if its last generation has
    none (the node died with its agent) and work was lost.
    """
    of: dict[tuple[str, int], dict[int, FailureKind]] = {}
    for generation in failed_generations:
        assert generation.failure is not None
        kinds = of.setdefault((generation.run, generation.attempt), {})
        kinds[generation.number] = FailureKind(generation.failure["kind"])
    found = []
    for attempt in attempts:
        kinds = of.get((attempt.run, attempt.number), {})
        failures = [kinds[number] for number in sorted(kinds)]
        if attempt.failure and attempt.generations not in kinds and _lost_work(attempt):
            failures.append(FailureKind(attempt.failure["kind"]))
        began, ended = attempt.started_at, attempt.ended_at
        seconds = (now if ended is None else ended) - (now if began is None else began)
        nodes = max(1, len(attempt.nodes))
        found.append(AttemptSpan(run=attempt.run, nodes=nodes, seconds=seconds, failures=tuple(failures)))
    return found


def _lost_work(attempt: Attempt) -> bool:
    """Return whether work was lost; a preempted job that saved has lost nothing."""
    return attempt.last_step is None or attempt.saved_step is None or attempt.saved_step < attempt.last_step


def count_failures(attempt_spans: list[AttemptSpan], run: str) -> tuple[FailureCount, FailureCount]:
    """Return the counts of the cluster's other runs and of this run."""
    others = [one for one in attempt_spans if one.run != run]
    own = [one for one in attempt_spans if one.run == run]
    return _sum(others, _OF_THE_CLUSTER), _sum(own, _OF_A_RUN)


def _sum(attempt_spans: list[AttemptSpan], kinds: frozenset[FailureKind]) -> FailureCount:
    return FailureCount(
        failures=sum(kind in kinds for one in attempt_spans for kind in one.failures),
        node_seconds=sum(one.nodes * max(0.0, one.seconds) for one in attempt_spans),
    )


def time_between_failures(nodes: int, *, node_days: float, cluster: FailureCount, run: FailureCount) -> float:
    """Return the mean seconds between failures of a job on `nodes` nodes.

    The prior is one failure per `node_days` node-days (64: a job of 64 nodes fails once a day; published rates of large
    clusters lie between 42 and 427). The cluster's history updates it, then the run's own.
    """
    shape, exposure = 1.0 + cluster.failures, node_days * DAY + cluster.node_seconds
    weight = min(1.0, _TRUST_IN_CLUSTER / shape)
    rate = (weight * shape + run.failures) / (weight * exposure + run.node_seconds)
    return 1.0 / (rate * nodes)
