"""Which nodes the next attempt avoids: only on evidence, only a share of the partition, only for a while."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.contract.config import RecoveryConfig
from trainer.contract.outcome import Failure, FailureKind

NODE_LOCAL = frozenset({FailureKind.NODE_LOST, FailureKind.NODE_SUSPECT})
"""Kinds that blame the node by themselves, when they name one."""
WEAK = frozenset({FailureKind.AGENT_LOST, FailureKind.RANK_KILLED, FailureKind.LAUNCH_FAILED})
"""Kinds that only happened on a node: two attempts must have died there before it is avoided."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What is known of one node; `failures` counts earlier attempts that failed on it."""

    name: str
    failures: int = 0
    excluded_until: float = 0.0


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
