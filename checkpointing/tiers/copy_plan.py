"""What is copied to a further tier, and by which rank (pure)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import FileEntry

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class TierContents:
    """What one tier has: names of its committed checkpoints that this attempt may load and relies on, newest first."""

    committed: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to copy and the tier to copy it from, or None, and why."""

    name: str | None
    source: int
    reason: str


def choose_checkpoint(
    contents: Sequence[TierContents],
    target: int,
    *,
    every: int = 0,
    latest: str | None = None,
    last: str | None = None,
    everything: bool = False,
) -> Choice:
    """What tier `target` should receive now from one of the faster ones.

    `latest` was just committed (None: look for the newest), `last` is what this tier received last, `everything` asks
    for the newest one whatever `every` says: a run that ends leaves its end everywhere.
    """
    here = contents[target].committed
    last = last or (here[0] if here else None)
    name, source = _newest(contents[:target], latest)
    if name is None:
        return Choice(None, 0, "no faster tier has a checkpoint that can be trusted")
    if name in here:
        return Choice(None, source, "the newest one is there already")
    if last is None:
        return Choice(name, source, "there is none yet")
    if everything:
        return Choice(name, source, "the last one goes everywhere")
    newer = _step(name) - _step(last)
    # After a roll-back, steps begin again below what was copied last.
    if 0 <= newer < every:
        return Choice(None, source, f"it is {newer} steps newer than the newest one there, {every} are asked for")
    return Choice(name, source, "there is a newer one")


def _newest(faster: Sequence[TierContents], latest: str | None) -> tuple[str | None, int]:
    """The name, and the fastest tier that has it."""
    found = {name: at for at in reversed(range(len(faster))) for name in faster[at].committed}
    if latest in found:
        assert latest is not None
        return latest, found[latest]
    best = max(found, key=lambda name: parse_name(name) or name, default=None)
    return best, found[best] if best is not None else 0


def _step(name: str) -> int:
    parts = parse_name(name)
    assert parts is not None
    return parts.step


def divide_files(files: Sequence[FileEntry], seen: Sequence[Collection[str] | None]) -> list[tuple[FileEntry, ...]]:
    """Who copies which file; `seen` are the names that each rank finds at the source, None when it finds them all.

    A rank's own shards stay its own, the rest is balanced by bytes. Raises ValueError for a file that nobody finds.
    """
    shares: list[list[FileEntry]] = [[] for _ in seen]
    load = [0] * len(seen)
    for entry in sorted(files, key=lambda entry: (_owner(entry.name, seen) is None, -entry.size, entry.name)):
        owner = _owner(entry.name, seen)
        finders = [rank for rank, names in enumerate(seen) if names is None or entry.name in names]
        if not finders:
            raise ValueError(f"{entry.name} is on no node that takes part")
        rank = owner if owner is not None else min(finders, key=lambda rank: (load[rank], rank))
        shares[rank].append(entry)
        load[rank] += entry.size
    return [tuple(part) for part in shares]


def _owner(name: str, seen: Sequence[Collection[str] | None]) -> int | None:
    match = _SHARD.fullmatch(name)
    rank = int(match[1]) if match else len(seen)
    if rank >= len(seen):
        return None
    names = seen[rank]
    return rank if names is None or name in names else None
