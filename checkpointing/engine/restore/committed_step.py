"""The newest step that is committed somewhere, after a restore: what came from memory need not be on a disk."""

from collections.abc import Sequence
from typing import Protocol

from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.owner import Owner
from checkpointing.tiers.tier import ResolvedTier


class Restored(Protocol):
    """The part of a restore's result that is needed here."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str: ...


def agree_on_committed_step(
    ranks: RankGroup, places: Sequence[ResolvedTier], owner: Owner, restored: Restored
) -> int | None:
    """Collective: the newest step up to the restored one that is committed somewhere, None when there is none.

    That is the step itself, unless it was loaded from memory and never reached a disk.
    """
    found: list[int | None] | Failed | None = None
    if ranks.leads:
        found = result_or_failed(lambda: [_committed(places, owner, restored)])
    told: list[int | None] | Failed = ranks.broadcast(found)
    return restored.step if isinstance(told, Failed) else told[0]


def _committed(places: Sequence[ResolvedTier], owner: Owner, restored: Restored) -> int | None:
    entries = [entry for place in places for entry in place.catalog.accepted(owner)]
    if any(entry.name == restored.name for entry in entries):
        return restored.step
    return max((entry.step for entry in entries if entry.step <= restored.step), default=None)
