"""Choose the nodes that the next attempt avoids.

A node is excluded only on evidence and for a limited time. No more than a set share of the partition is excluded.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.recovery.failure_rate import NODE_LOCAL, WEAK, NodeHistory, is_worse
from orchestrator.registry.records import Notice
from trainer.protocol.config import RecoveryConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.time_spans import span

REMEMBERED = 14 * 86400.0
"""Seconds for which hangs and slowness count against a node; after that it may have been repaired or moved."""
TWO_HANGS = 2
_NOT_NODE_FAULTS = frozenset({"desync", "network"})  # incidents caused by a program, or by two nodes
DRILLED = "drilled"  # notice key: the run's configuration requests a fault in this generation
Place = tuple[str, int, int]  # generation: run, attempt, number


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """Record of one node, and of the other nodes in its cluster."""

    name: str
    history: NodeHistory = field(default_factory=NodeHistory)
    others: NodeHistory = field(default_factory=NodeHistory)
    excluded_until: float = 0.0
    # Evidence since its last exclusion:
    hangs: int = 0  # attempts in which a rank on it stopped first
    slow: int = 0  # attempts that it slowed down until their end
    replaced: int = 0  # attempts in which a spare replaced it for a reason that is weak evidence
    faulty: str = ""  # the node's own fault, in a job that continued without it
    by_person: bool = False  # a person has excluded it


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Nodes that a run may use; `size` may be None (not reported by the scheduler)."""

    size: int | None
    needed: int
    in_service: int | None = None  # nodes that no person has excluded; set if a job would otherwise lack nodes
    known: tuple[NodeRecord, ...] = ()
    node_days: float = 64.0  # node-days between failures, before any history (checkpoint.auto.node_days)

    @property
    def by_persons(self) -> frozenset[str]:
        """Nodes that people have excluded. The share limit does not apply to them."""
        return frozenset(node.name for node in self.known if node.by_person)

    @property
    def excludable(self) -> int:
        """Number of nodes that orch can exclude and still start the job."""
        if self.in_service is not None:
            return max(0, self.in_service - self.needed)
        size = self.size if self.size is not None else len(self.known)
        return max(0, size - self.needed - len(self.by_persons))


@dataclass(frozen=True, kw_only=True)
class ExclusionDecision:
    """Whether a failure excludes its node, until when, and why."""

    node: str | None
    reason: str
    until: float = 0.0


def blame(failure: Failure, node: str, pool: Pool, recovery: RecoveryConfig, now: float) -> ExclusionDecision:
    """Judge a node that `failure` names."""
    if failure.kind in NODE_LOCAL:
        return _exclude_within_limit(node, f"{failure.kind} on {node}", pool, recovery, now)
    if failure.kind not in WEAK:
        return ExclusionDecision(node=None, reason=f"{failure.kind} is not evidence about {node}")
    record = next((known for known in pool.known if known.name == node), NodeRecord(name=node))
    history = replace(record.history, failed=(0.0, *record.history.failed))
    if len(history.failed) == 1:
        return ExclusionDecision(node=None, reason=f"a single {failure.kind} on {node} is not evidence against it")
    # A second, independent failure soon afterwards is a pattern.
    if is_worse(history, record.others, pool.node_days):
        return _exclude_within_limit(node, _often(node, history), pool, recovery, now)
    return ExclusionDecision(node=None, reason=f"{_often(node, history)}: that may be chance")


def nodes_to_exclude(
    failure: Failure | None, pool: Pool, recovery: RecoveryConfig, now: float
) -> list[ExclusionDecision]:
    """Judge the nodes that the failure names, then nodes with a bad record, giving a reason for each."""
    found: list[ExclusionDecision] = []
    if failure is not None:
        for node in failure.nodes:
            found.append(blame(failure, node, _without(pool, found, now), recovery, now))
    for record in pool.known:
        reason = _reason_against(record, recovery, pool.node_days)
        if reason and record.name not in {one.node for one in found} and record.excluded_until <= now:
            found.append(_exclude_within_limit(record.name, reason, _without(pool, found, now), recovery, now))
    return found


def _without(pool: Pool, found: Sequence[ExclusionDecision], now: float) -> Pool:
    """Return the pool after these exclusions, so that they count towards the share limit."""
    taken = {one.node for one in found}
    known = (replace(one, excluded_until=now + 1.0) if one.name in taken else one for one in pool.known)
    return replace(pool, known=tuple(known))


def _reason_against(record: NodeRecord, recovery: RecoveryConfig, node_days: float) -> str:
    """Return the evidence against a node that has ended no attempt; empty if it is insufficient."""
    if record.faulty:
        return f"{record.name}: {record.faulty}"
    # A loss that a spare replaced counts as a failure, like a loss that ended its attempt.
    if record.replaced and len(record.history.failed) > 1 and is_worse(record.history, record.others, node_days):
        return _often(record.name, record.history)
    if record.hangs >= TWO_HANGS:
        return f"ranks on {record.name} hung in {record.hangs} attempts"
    bound = recovery.exclude_slow_after
    if bound and record.slow >= bound:
        return f"{record.name} slowed down {record.slow} attempts (recovery.exclude_slow_after)"
    return ""


def drilled_generations(notices: Iterable[Notice]) -> set[Place]:
    """Return the generations with a drill. Their incidents do not count against nodes."""
    return {_place(one) for one in notices if one.kind == EventKind.DRILL or one.data.get(DRILLED)}


def hangs(notices: Sequence[Notice]) -> dict[str, int]:
    """Count, for each node, the attempts in which one of its ranks stopped first, according to incidents.

    A faulty program hangs again after a restart in place, so only another attempt is independent evidence.
    """
    drilled = drilled_generations(notices)
    incidents = (
        one for one in notices
        if one.kind == EventKind.INCIDENT and not one.data.get("withdrawn") and _place(one) not in drilled
    )  # fmt: skip
    return _by_node(
        {(one.node, one.run, one.attempt) for one in incidents if one.data.get("kind") not in _NOT_NODE_FAULTS}
    )


def of_every_node(notices: Iterable[Notice]) -> Iterator[Notice]:
    """Yield an incident with several root causes once per node; the incident's own node is the first cause's."""
    for notice in notices:
        culprits = notice.data.get("culprits") if notice.kind == EventKind.INCIDENT else None
        rows = culprits if isinstance(culprits, list) else []
        names = (notice.node, *(str(one.get("node") or "") for one in rows if isinstance(one, dict)))
        yield from (replace(notice, node=name) for name in dict.fromkeys(names))


def slowness(notices: Sequence[Notice], generations: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Count, for each node, the attempts whose last generation ended with one of its ranks as a straggler.

    `generations`: number of generations by (run, attempt).
    """
    drilled = drilled_generations(notices)
    last: dict[tuple[str, str, int, object], bool] = {}
    for notice in notices:
        newest = generations.get((notice.run, notice.attempt), notice.generation)
        if notice.kind != EventKind.STRAGGLER or notice.generation < newest or _place(notice) in drilled:
            continue
        last[notice.node, notice.run, notice.attempt, notice.data.get("rank")] = not notice.data.get("over")
    return _by_node({(node, run, attempt) for (node, run, attempt, _), still in last.items() if still})


def faulty(
    notices: Sequence[Notice], generations: Mapping[tuple[str, int], int], gone: Collection[tuple[str, int, str]]
) -> dict[str, str]:
    """Map each node to its own fault in an attempt that trained without it.

    `gone`: (run, attempt, node) for nodes that the scheduler removed from a job that continued.
    """
    found: dict[str, str] = {}
    for notice in notices:
        data, reason = notice.data, str(notice.data.get("reason", ""))
        if data.get("drill"):
            continue
        # If no rank has trained, the fault may be in all nodes.
        if notice.kind == EventKind.PREFLIGHT and generations.get((notice.run, notice.attempt), 0) > 0:
            found[notice.node] = f"it failed its checks: {reason}"
        elif notice.kind == EventKind.SPARE_USED and (notice.run, notice.attempt, notice.node) in gone:
            found[notice.node] = f"{FailureKind.NODE_LOST}: {reason}"
        elif notice.kind == EventKind.SPARE_USED and data.get("kind") in NODE_LOCAL:
            found[notice.node] = f"{data['kind']}: {reason}"
    found.pop("", None)
    return found


def count_replacements(notices: Sequence[Notice]) -> dict[str, int]:
    """Count, for each node, the attempts in which a spare replaced it."""
    drilled = drilled_generations(notices)
    spares = (one for one in notices if one.kind == EventKind.SPARE_USED and not one.data.get("drill"))
    return _by_node({(one.node, one.run, one.attempt) for one in spares if _place(one) not in drilled})


def _often(node: str, history: NodeHistory) -> str:
    return f"{len(history.failed)} attempts failed on {node} within {span(max(history.failed))}"


def _place(notice: Notice) -> Place:
    return notice.run, notice.attempt, notice.generation


def _by_node(found: Collection[tuple[str, str, int]]) -> dict[str, int]:
    return dict(Counter(node for node, _, _ in found if node))


def _exclude_within_limit(
    node: str, reason: str, pool: Pool, recovery: RecoveryConfig, now: float
) -> ExclusionDecision:
    if node in pool.by_persons:
        return ExclusionDecision(node=None, reason=f"{reason}; a person has already excluded it")
    listed = [name for name in excluded_nodes(pool.known, now) if name != node and name not in pool.by_persons]
    if len(listed) + 1 > exclusion_limit(pool, recovery):
        return ExclusionDecision(node=None, reason=f"{reason}, but no more nodes in the partition may be excluded")
    return ExclusionDecision(node=node, until=now + recovery.exclude_hours * 3600, reason=reason)


def exclusion_limit(pool: Pool, recovery: RecoveryConfig) -> int:
    """Return how many nodes orch may exclude: the configured share, but at least one if a node can be spared."""
    size = pool.size if pool.size is not None else len(pool.known)
    return min(pool.excludable, max(1, int(size * recovery.exclude_share)))


def avoided_nodes(pool: Pool, recovery: RecoveryConfig, now: float) -> tuple[str, ...]:
    """Return the nodes that the next job must avoid: people's exclusions, and orch's latest ones up to its limit."""
    until = {node.name: node.excluded_until for node in pool.known if not node.by_person}
    latest = sorted((name for name in until if until[name] > now), key=lambda name: until[name], reverse=True)
    return tuple(sorted({*pool.by_persons, *latest[: exclusion_limit(pool, recovery)]}))


def excluded_nodes(known: Sequence[NodeRecord], now: float) -> tuple[str, ...]:
    """Return the nodes whose exclusion has not expired, sorted."""
    return tuple(sorted(node.name for node in known if node.excluded_until > now))
