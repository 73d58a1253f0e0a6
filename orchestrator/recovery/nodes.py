"""Which nodes the next attempt avoids: only on evidence, only a share of the partition, only for a while."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.registry.records import Notice
from trainer.contract.config import RecoveryConfig
from trainer.contract.events import EventKind
from trainer.contract.outcome import Failure, FailureKind

NODE_LOCAL = frozenset({FailureKind.NODE_LOST, FailureKind.NODE_SUSPECT})
"""Kinds that blame the node by themselves, when they name one."""
WEAK = frozenset({FailureKind.AGENT_LOST, FailureKind.RANK_KILLED, FailureKind.LAUNCH_FAILED, FailureKind.HANG})
"""Kinds that only happened on a node: two attempts must have died there before it is avoided."""

REMEMBERED = 14 * 86400.0
"""Seconds for which hangs and slowness tell something of a node: later it is another one, mended or moved."""
TWO_HANGS = 2
_NOT_THE_NODE = frozenset({"desync", "network"})
"""Incidents that a program, or two nodes together, have brought about."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What is known of one node; `failures` counts earlier attempts that failed on it."""

    name: str
    failures: int = 0
    excluded_until: float = 0.0
    hangs: int = 0  # generations in which one of its ranks stopped first, since it was excluded last
    slow: int = 0  # attempts that it slowed down to their end, since it was excluded last


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The nodes a run may use; `size` is None where the scheduler does not tell."""

    size: int | None
    needed: int
    known: tuple[Standing, ...] = ()

    @property
    def excludable(self) -> int:
        """Nodes that can be spared without making the job impossible."""
        size = self.size if self.size is not None else len(self.known)
        return max(0, size - self.needed)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Whether a failure puts its node on the list, until when, and why."""

    node: str | None
    until: float
    reason: str


def blame(failure: Failure, pool: Pool, recovery: RecoveryConfig, now: float) -> Blame:
    """Judge the node that `failure` names."""
    node = failure.node
    if node is None:
        return Blame(node=None, until=0.0, reason="the failure names no node")
    earlier = next((known.failures for known in pool.known if known.name == node), 0)
    until = now + recovery.exclude_hours * 3600
    if failure.kind in NODE_LOCAL:
        return _capped(node, until, f"{failure.kind} on {node}", pool, recovery, now)
    # One death on a node says little; a second, independent one is a pattern.
    if failure.kind in WEAK and earlier >= 1:
        return _capped(node, until, f"{earlier + 1} attempts failed on {node}", pool, recovery, now)
    return Blame(node=None, until=0.0, reason=f"{failure.kind} once on {node} is no evidence against it")


def accused(failure: Failure | None, pool: Pool, recovery: RecoveryConfig, now: float) -> list[Blame]:
    """Judge the node that the failure names, then those whose record speaks against them; each with its reason."""
    found = [blame(failure, pool, recovery, now)] if failure is not None else []
    for standing in pool.known:
        reason = _record(standing, recovery)
        taken = {one.node for one in found}
        if reason and standing.name not in taken and standing.excluded_until <= now:
            # What has just been taken out counts against the share that may be.
            known = tuple(replace(one, excluded_until=now + 1.0) if one.name in taken else one for one in pool.known)
            until = now + recovery.exclude_hours * 3600
            found.append(_capped(standing.name, until, reason, replace(pool, known=known), recovery, now))
    return found


def _record(standing: Standing, recovery: RecoveryConfig) -> str:
    """What a node has done again and again without ending an attempt; empty when that is not enough."""
    if standing.hangs >= TWO_HANGS:
        return f"ranks on {standing.name} hung {standing.hangs} times"
    bound = recovery.straggler.replace_after
    if bound and standing.slow >= bound:
        return f"{standing.name} slowed down {standing.slow} attempts (recovery.straggler.replace_after)"
    return ""


def hangs(notices: Iterable[Notice]) -> dict[str, int]:
    """By node: generations in which one of its ranks was the first to stop, as incidents tell."""
    found: dict[str, set[tuple[str, int, int]]] = {}
    for notice in notices:
        told = notice.data
        if notice.kind != EventKind.INCIDENT or told.get("withdrawn") or told.get("kind") in _NOT_THE_NODE:
            continue
        found.setdefault(notice.node, set()).add((notice.run, notice.attempt, notice.generation))
    return {node: len(which) for node, which in found.items() if node}


def slowness(notices: Iterable[Notice]) -> dict[str, int]:
    """By node: attempts in which one of its ranks was a straggler and did not become as fast again."""
    last: dict[tuple[str, str, int, object], bool] = {}
    for notice in notices:
        if notice.kind == EventKind.STRAGGLER:
            last[notice.node, notice.run, notice.attempt, notice.data.get("rank")] = not notice.data.get("over")
    slow = {(node, run, attempt) for (node, run, attempt, _), still in last.items() if still}
    return {name: sum(node == name for node, _, _ in slow) for name in {node for node, _, _ in slow} if name}


def _capped(node: str, until: float, reason: str, pool: Pool, recovery: RecoveryConfig, now: float) -> Blame:
    listed = [name for name in excluded(pool.known, now) if name != node]
    if len(listed) + 1 > limit(pool, recovery):
        return Blame(node=None, until=0.0, reason=f"{reason}, but no more nodes of the partition may be excluded")
    return Blame(node=node, until=until, reason=reason)


def limit(pool: Pool, recovery: RecoveryConfig) -> int:
    """Most nodes that may be excluded: the configured share, one at least where one can be spared."""
    size = pool.size if pool.size is not None else len(pool.known)
    return min(pool.excludable, max(1, int(size * recovery.exclude_share)))


def excluded(known: Sequence[Standing], now: float) -> tuple[str, ...]:
    """Names whose exclusion has not expired, in order."""
    return tuple(sorted(node.name for node in known if node.excluded_until > now))
