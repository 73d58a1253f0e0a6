"""Checkpoint copies that failed a restore test or a verification. A restore never chooses them."""

from collections.abc import Iterable, Sequence

from checkpointing.storage.backends import Storage
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import bad_copies, read_verdicts

CorruptCopy = tuple[str, int, str]
"""Checkpoint name, tier number, and the fault."""


def corrupt_copies(verdicts: Storage | None, places: Sequence[ResolvedTier]) -> tuple[CorruptCopy, ...]:
    """List every copy with a bad verdict that still holds; `verdicts` is the storage of the run's own folder.

    Unreadable places are skipped, because a restore verifies every byte anyway.
    """
    if verdicts is None:
        return ()
    try:
        known = read_verdicts(verdicts)
    except OSError:
        return ()
    found: list[CorruptCopy] = []
    for number, place in enumerate(places):
        try:
            bad = bad_copies(known, place.path, place.storage)
        except OSError:
            continue
        found += [(name, number, reason) for name, reason in sorted(bad.items())]
    return tuple(found)


def why_corrupt(copies: Iterable[CorruptCopy], name: str, place: int) -> str:
    """Return the reason not to load this copy, or an empty string. A fault in the first tier holds for all copies."""
    return next((reason or "found bad" for other, at, reason in copies if other == name and at in (0, place)), "")
