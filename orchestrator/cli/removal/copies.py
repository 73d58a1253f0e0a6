"""Checkpoints of a run in further tiers: whose they are, and how they are deleted with it."""

import os
from collections.abc import Collection
from dataclasses import dataclass

from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import delete
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.storage_errors import error_words
from orchestrator.cli.checkpoints.tiers import Tier, tiers_of
from trainer.contract.run_dir import RunDir

AttemptId = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class TierCopies:
    """What a run has in one further tier; `left` says what stays there, and why."""

    tier: Tier
    names: tuple[str, ...] = ()
    bytes: int = 0
    left: str = ""

    @property
    def place(self) -> str:
        return self.tier.catalog.place


def find_copies(folder: RunDir, attempts: Collection[AttemptId], *, keep: bool) -> list[TierCopies]:
    """What a run with these attempts has in tiers outside its folder; with `keep`, all of it stays."""
    outside = [tier for tier in tiers_of(folder) if not tier.catalog.root.is_relative_to(folder.path)]
    return [_found(tier, attempts, keep) for tier in outside]


def _found(tier: Tier, attempts: Collection[AttemptId], keep: bool) -> TierCopies:
    try:
        names = tier.catalog.names()
        if keep:
            return TierCopies(tier=tier, left=f"{len(names)} checkpoints (--keep-copies)" if names else "")
        own = tuple(name for name in names if _is_own(tier, name, attempts))
        size = sum(length or 0 for name in own for length in tier.storage.list(name).values())
    except OSError as error:
        return TierCopies(tier=tier, left=f"it cannot be read from here: {error_words(error)}")
    others = f"{len(names) - len(own)} checkpoints of another run" if len(own) < len(names) else ""
    apart = "" if tier.shared else "what other nodes have on their own disks"
    return TierCopies(tier=tier, names=own, bytes=size, left="; ".join(filter(None, (others, apart))))


def _is_own(tier: Tier, name: str, attempts: Collection[AttemptId]) -> bool:
    """By the nonce in its name: a run of another registry may bear the same name. A link is nobody's."""
    parts = parse_name(name)
    if parts is None or (parts.attempt, parts.nonce) not in attempts:
        return False
    local = isinstance(tier.storage, LocalStorage)
    return not (local and any(os.path.islink(place) for place in (tier.catalog.root, tier.catalog.root / name)))


def delete_copies(copies: TierCopies) -> None:
    """Delete them, and the run's folder in that tier once it is empty; raises OSError."""
    for name in copies.names:
        delete(copies.tier.storage, name, lambda: True)
    storage = copies.tier.storage
    if copies.names and isinstance(storage, LocalStorage) and not storage.list(""):
        storage.delete("")
