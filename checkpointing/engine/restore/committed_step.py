"""The newest committed step after a restore. A state restored from memory may never have reached a disk."""

from collections.abc import Sequence
from typing import Protocol

from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.owner import Owner
from checkpointing.tiers.tier import ResolvedTier


class Restored(Protocol):
    """The fields of a restore's result that this module reads."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str: ...


def agree_on_committed_step(
    ranks: RankGroup, places: Sequence[ResolvedTier], owner: Owner, restored: Restored
) -> int | None:
    """Collective: return the newest committed step up to the restored step, or None if no step is committed.

    It is older than the restored step if that was loaded from memory and never reached a disk.
    """
    found: list[int | None] | Failed | None = None
    if ranks.leads:
        found = result_or_failed(lambda: [_find_committed(places, owner, restored)])
    answer: list[int | None] | Failed = ranks.broadcast(found)
    return restored.step if isinstance(answer, Failed) else answer[0]


def _find_committed(places: Sequence[ResolvedTier], owner: Owner, restored: Restored) -> int | None:
    entries = [entry for place in places for entry in place.catalog.accepted(owner)]
    if any(entry.name == restored.name for entry in entries):
        return restored.step
    return max((entry.step for entry in entries if entry.step <= restored.step), default=None)
