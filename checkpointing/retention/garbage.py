"""Pins, and the deletion of checkpoints and debris in two phases.

Each pin is a file, so concurrent pins do not overwrite each other.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from checkpointing.format.commit import DELETED, parse_name
from checkpointing.format.manifest import COMMIT
from checkpointing.storage.backends import Storage
from checkpointing.storage.durable import canonical
from checkpointing.tiers.catalog import Catalog

PINS = "pins"
SCHEMA = "orch.pin/1"


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Reason for keeping a checkpoint, and the time of the pin (seconds since the epoch)."""

    note: str
    pinned_at: float


def read_pins(storage: Storage) -> dict[str, Pin]:
    """Return all pins by checkpoint name; a damaged pin still counts. Raises OSError if they cannot be listed."""
    names = [name for name, size in storage.list(PINS).items() if size is not None and parse_name(name)]
    return {name: _read(storage, name) for name in names}


def pinned_names(storage: Storage) -> frozenset[str]:
    """Return the pinned names; raises OSError if they cannot be listed, in which case nothing may be deleted."""
    return frozenset(name for name, size in storage.list(PINS).items() if size is not None)


def pin(storage: Storage, name: str, note: str, now: float) -> None:
    """Keep a checkpoint until `unpin`; pinning again replaces the note.

    Raises OSError, or ValueError if `name` is not a checkpoint's name. Retention may already be deleting the
    checkpoint, so check afterwards that it is still committed.
    """
    if parse_name(name) is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    storage.publish(f"{PINS}/{name}", canonical({"schema": SCHEMA, "note": note, "pinned_at": now}))


def unpin(storage: Storage, name: str) -> bool:
    """Return a checkpoint to retention; return False if it was not pinned."""
    if name not in pinned_names(storage):
        return False
    storage.delete(f"{PINS}/{name}")
    return True


def _read(storage: Storage, name: str) -> Pin:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with storage.open(f"{PINS}/{name}") as stream:
            fields = json.loads(stream.read())
        return Pin(note=str(fields["note"]), pinned_at=float(fields["pinned_at"]))
    return Pin(note="", pinned_at=0.0)


_NOTE = b"The deletion of this checkpoint was begun; it is no longer one.\n"

AttemptId = tuple[int, str]
"""Attempt and nonce of a folder's owner, from the folder's name."""


class DebrisState(Enum):
    """State of a folder without a valid marker."""

    HALF_WRITTEN = "half-written"
    TOMBSTONED = "half-deleted"


@dataclass(frozen=True, kw_only=True)
class DebrisFolder:
    """A folder with a checkpoint's name that is not a checkpoint; `bytes` is the size of its files."""

    name: str
    state: DebrisState
    bytes: int

    @property
    def attempt_id(self) -> AttemptId:
        parts = parse_name(self.name)
        assert parts is not None
        return parts.attempt, parts.nonce


@dataclass(frozen=True, kw_only=True)
class GarbageDecision:
    """Decision to collect a folder or not, with the reason."""

    folder: DebrisFolder
    collect: bool
    reason: str


def find_debris(catalog: Catalog) -> list[DebrisFolder]:
    """Return every uncommitted folder with a checkpoint's name, newest first; raises OSError."""
    return [_folder(catalog, name) for name in catalog.names() if not catalog.is_committed(name)]


def _folder(catalog: Catalog, name: str) -> DebrisFolder:
    sizes = catalog.storage.list(name).values()
    state = DebrisState.TOMBSTONED if catalog.is_tombstoned(name) else DebrisState.HALF_WRITTEN
    return DebrisFolder(name=name, state=state, bytes=sum(size or 0 for size in sizes))


def decide_debris(
    folders: Iterable[DebrisFolder],
    *,
    owner: AttemptId | None = None,
    ended: Collection[AttemptId] = (),
    inherit: Collection[str] = (),
    busy: Collection[str] = (),
) -> list[GarbageDecision]:
    """Decide on every folder by owner and epoch, never by age.

    `owner` is the caller's own attempt, `ended` are attempts that no longer write, `inherit` the names that the launch
    token hands over, `busy` the names that are being written or read.
    """
    return [_decide(folder, owner, ended, inherit, busy) for folder in folders]


def _decide(
    folder: DebrisFolder,
    owner: AttemptId | None,
    ended: Collection[AttemptId],
    inherit: Collection[str],
    busy: Collection[str],
) -> GarbageDecision:
    def verdict(collect: bool, reason: str) -> GarbageDecision:
        return GarbageDecision(folder=folder, collect=collect, reason=reason)

    attempt, nonce = folder.attempt_id
    if folder.name in busy:
        return verdict(False, "is being written")
    # The process that published the tombstone held the fence, and no reader has loaded the checkpoint since.
    if folder.state is DebrisState.TOMBSTONED:
        return verdict(True, "its deletion was begun and not finished")
    if folder.attempt_id == owner:
        return verdict(True, "half-written by this attempt itself")
    if folder.name in inherit:
        return verdict(True, "handed over to this attempt, and not committed")
    if folder.attempt_id in ended:
        return verdict(True, f"half-written by attempt {attempt} ({nonce}), which has ended")
    return verdict(False, f"half-written by attempt {attempt} ({nonce}), which is not known to have ended")


def delete_debris(
    storage: Storage,
    verdicts: Sequence[GarbageDecision],
    fence: Callable[[], bool],
    gone: Callable[[DebrisFolder], object] = lambda folder: None,
) -> list[str]:
    """Delete the folders decided on; return the deleted names, fewer if the fence was lost.

    `gone` is called with each deleted folder. A failed deletion does not stop the others; its OSError is raised at the
    end.
    """
    names, errors = [], []
    for verdict in verdicts:
        if not verdict.collect:
            continue
        try:
            if not delete(storage, verdict.folder.name, fence):
                break
        except OSError as error:
            errors.append(error)
            continue
        names.append(verdict.folder.name)
        gone(verdict.folder)
    if errors:
        raise errors[0]
    return names


def attempt_ids(texts: Iterable[str]) -> set[AttemptId]:
    """Parse texts of the form `<attempt>-<nonce>`; other texts are ignored."""
    parts = [text.partition("-") for text in texts]
    return {(int(attempt), nonce) for attempt, _, nonce in parts if attempt.isdecimal() and nonce}


def delete(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
    """Delete one checkpoint or its remains; return False once the fence is lost, without touching anything more.

    The tombstone is published before any file is deleted and is itself deleted last. After a crash at any point there
    is either a whole checkpoint, or a folder that readers ignore and every collector recognizes as half-deleted.
    """
    files = storage.list(name)
    if COMMIT in files and DELETED not in files:
        if not fence():
            return False
        storage.publish(f"{name}/{DELETED}", _NOTE)
        files[DELETED] = len(_NOTE)
    for file in sorted(files, key=lambda file: (file == DELETED, file != COMMIT, file)):
        if not fence():
            return False
        storage.delete(f"{name}/{file}")
    if not fence():
        return False
    storage.delete(name)
    return True
