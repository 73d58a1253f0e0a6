"""Pins, and the deletion of checkpoints and debris in two phases.

Each pin is a file, so two people who pin at once keep both pins.
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
    """Why a checkpoint is kept, and since when (seconds since the epoch)."""

    note: str
    pinned_at: float


def read_pins(storage: Storage) -> dict[str, Pin]:
    """All pins by the checkpoint's name; a damaged one still pins. Raises OSError when they cannot be listed."""
    names = [name for name, size in storage.list(PINS).items() if size is not None and parse_name(name)]
    return {name: _read(storage, name) for name in names}


def pinned_names(storage: Storage) -> frozenset[str]:
    """The names alone; raises OSError when they cannot be listed: then nothing may be deleted."""
    return frozenset(name for name, size in storage.list(PINS).items() if size is not None)


def pin(storage: Storage, name: str, note: str, now: float) -> None:
    """Keep a checkpoint until `unpin`; again replaces the note. Raises OSError, ValueError for no checkpoint's name.

    Retention may have begun to delete it at this very moment: look whether it is still committed afterwards.
    """
    if parse_name(name) is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    storage.publish(f"{PINS}/{name}", canonical({"schema": SCHEMA, "note": note, "pinned_at": now}))


def unpin(storage: Storage, name: str) -> bool:
    """Leave a checkpoint to retention again; False when it was not pinned."""
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
"""Attempt and nonce: whose a folder is, as its name says."""


class DebrisState(Enum):
    """What a folder without a valid marker is."""

    HALF_WRITTEN = "half-written"
    TOMBSTONED = "half-deleted"


@dataclass(frozen=True, kw_only=True)
class DebrisFolder:
    """A folder that bears a checkpoint's name and is none; `bytes` is what lies in it."""

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
    """Whether a folder is collected, and why or why not."""

    folder: DebrisFolder
    collect: bool
    reason: str


def find_debris(catalog: Catalog) -> list[DebrisFolder]:
    """Everything that bears a checkpoint's name and is not committed, newest first; raises OSError."""
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

    `owner` is the caller's own attempt, `ended` are attempts that are known to write no more, `inherit` the names that
    the launch token hands over, `busy` what is being written or read right now.
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
    # The process that published the tombstone held the fence, and no reader has loaded it since.
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
    """Delete what was decided on; returns the names that are gone, fewer when the fence was lost.

    `gone` is called with each folder. One that cannot be deleted keeps none of the others; then raises its OSError.
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
    """What `<attempt>-<nonce>` stands for; anything else stands for nobody."""
    parts = [text.partition("-") for text in texts]
    return {(int(attempt), nonce) for attempt, _, nonce in parts if attempt.isdecimal() and nonce}


def delete(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
    """Delete one checkpoint or its remains; False when the fence was lost and nothing more was touched.

    The tombstone comes before anything is taken away and goes last of all files: after a crash at any point there is
    either a whole checkpoint, or a folder that no reader takes for one and that any collector knows as half-deleted.
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
