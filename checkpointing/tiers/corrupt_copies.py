"""Copies of checkpoints that a restore test or a verification has found bad: no restore chooses them."""

from collections.abc import Iterable, Sequence

from checkpointing.storage.backends import Storage
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import bad_copies, read_verdicts

CorruptCopy = tuple[str, int, str]
"""Name, number of the tier, and what was found."""


def corrupt_copies(verdicts: Storage | None, places: Sequence[ResolvedTier]) -> tuple[CorruptCopy, ...]:
    """Every copy with a bad verdict that still holds; `verdicts` is the storage of the run's own folder.

    What cannot be read is left out: a restore verifies every byte all the same.
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
    """The reason not to load this copy; empty when there is none. What was found in the first tier holds everywhere."""
    return next((reason or "found bad" for other, at, reason in copies if other == name and at in (0, place)), "")
