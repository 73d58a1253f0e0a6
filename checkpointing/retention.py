"""Which checkpoints may go (pure), and the act of deleting one."""

from collections.abc import Callable, Collection, Sequence

from checkpointing.catalog import Entry
from checkpointing.manifest import COMMIT
from checkpointing.storage import Storage

FLOOR = 2


def surplus(entries: Sequence[Entry], keep: int, pinned: Collection[str] = ()) -> list[Entry]:
    """Entries to delete, oldest first: all but the newest `keep` (never fewer than 2) and the pinned ones.

    `entries` are committed and trusted ones, newest first: refused ones must not be counted as a substitute.
    """
    loose = [entry for entry in entries if entry.name not in pinned]
    return loose[max(keep, FLOOR) :][::-1]


def delete(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
    """Delete one checkpoint, COMMIT first; False when the fence was lost and nothing more was touched.

    A crash in between leaves a folder without COMMIT, which no reader lists and its owner collects.
    """
    files = storage.list(name)
    for file in sorted(files, key=lambda file: file != COMMIT):
        if not fence():
            return False
        storage.delete(f"{name}/{file}")
    if not fence():
        return False
    storage.delete(name)
    return True
