"""Pins, and the deletion of checkpoints and debris in two phases.

Each holder has its own file, so concurrent pins never overwrite or remove each other. `NAME` is a user's pin;
`NAME@HOLDER` is a pin held by a restore test or by a process that is reading the checkpoint.
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
    """The reason for keeping a checkpoint, and when it was pinned (in seconds since the epoch)."""

    note: str
    pinned_at: float
    process: str = ""  # the pin holds for as long as this process lives; if empty, until it is removed


def read_pins(storage: Storage) -> dict[str, Pin]:
    """Return one pin per checkpoint, preferably a user's. Damaged pins count too. Raises OSError if listing fails."""
    found: dict[str, Pin] = {}
    for (name, _), held in read_all_pins(storage).items():
        found.setdefault(name, held)
    return found


def read_all_pins(storage: Storage) -> dict[tuple[str, str], Pin]:
    """Return all pins by checkpoint and holder, a user's ("") first. Raises OSError if they cannot be listed."""
    return {key: _read(storage, _pin_file(*key)) for key in sorted(_list_pins(storage)) if parse_name(key[0])}


def pinned_names(storage: Storage) -> frozenset[str]:
    """Return the pinned names. Raises OSError if they cannot be listed, and then nothing may be deleted."""
    return frozenset(name for name, _ in _list_pins(storage))


def pin(storage: Storage, name: str, note: str, now: float, *, holder: str = "", process: str = "") -> None:
    """Keep a checkpoint until `unpin` or, if the pin has a holder, `remove_pin`. Pinning again replaces the note.

    Raises OSError, or ValueError if `name` is not a checkpoint's name. Retention may already be deleting the
    checkpoint, so check afterwards that it is still committed.
    """
    if parse_name(name) is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    fields = {"schema": SCHEMA, "note": note, "pinned_at": now, "process": process}
    storage.publish(_pin_file(name, holder), canonical(fields))


def remove_pin(storage: Storage, name: str, holder: str) -> None:
    """Remove one holder's pin, if it exists."""
    storage.delete(_pin_file(name, holder))


def unpin(storage: Storage, name: str) -> bool:
    """Remove all pins from a checkpoint; return False if it was not pinned."""
    held = [key for key in _list_pins(storage) if key[0] == name]
    for key in held:
        remove_pin(storage, *key)
    return bool(held)


def _list_pins(storage: Storage) -> list[tuple[str, str]]:
    parts = [file.partition("@") for file, size in storage.list(PINS).items() if size is not None]
    return [(name, holder) for name, _, holder in parts]


def _pin_file(name: str, holder: str) -> str:
    return f"{PINS}/{name}@{holder}" if holder else f"{PINS}/{name}"


def _read(storage: Storage, path: str) -> Pin:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with storage.open(path) as stream:
            fields = json.loads(stream.read())
        note, pinned_at = str(fields["note"]), float(fields["pinned_at"])
        return Pin(note=note, pinned_at=pinned_at, process=str(fields.get("process", "")))
    return Pin(note="", pinned_at=0.0)


_NOTE = b"The deletion of this checkpoint has begun; it is no longer a checkpoint.\n"

AttemptId = tuple[int, str]
"""The attempt and nonce of a folder's owner, as given by the folder's name."""


class DebrisState(Enum):
    """State of a folder without a valid marker."""

    HALF_WRITTEN = "half-written"
    TOMBSTONED = "half-deleted"


@dataclass(frozen=True, kw_only=True)
class DebrisFolder:
    """A folder that has a checkpoint's name but is not a checkpoint. `bytes` is the total size of its files."""

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
    """The decision on whether to collect a folder, and the reason."""

    folder: DebrisFolder
    collect: bool
    reason: str


def find_debris(catalog: Catalog) -> list[DebrisFolder]:
    """Return every uncommitted folder with a checkpoint's name, newest first. Raises OSError."""
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
    """Decide on each folder by its owner, never by its age.

    `owner` is the caller's own attempt, `ended` are the attempts that no longer write, `inherit` are the names that the
    launch token hands over, and `busy` are the names that are being written or read.
    """

    def decide(folder: DebrisFolder) -> tuple[bool, str]:
        attempt, nonce = folder.attempt_id
        if folder.name in busy:
            return False, "is being written"
        # The process that published the tombstone held the fence, and no reader can have loaded the checkpoint since
        # then.
        if folder.state is DebrisState.TOMBSTONED:
            return True, "its deletion began but did not finish"
        if folder.attempt_id == owner:
            return True, "half-written by this attempt itself"
        if folder.name in inherit:
            return True, "handed over to this attempt, and not committed"
        if folder.attempt_id in ended:
            return True, f"half-written by attempt {attempt} ({nonce}), which has ended"
        return False, f"half-written by attempt {attempt} ({nonce}), which is not known to have ended"

    decisions = [(folder, *decide(folder)) for folder in folders]
    return [GarbageDecision(folder=folder, collect=collect, reason=reason) for folder, collect, reason in decisions]


def delete_debris(
    storage: Storage,
    verdicts: Sequence[GarbageDecision],
    fence: Callable[[], bool],
    gone: Callable[[DebrisFolder], object] = lambda folder: None,
) -> list[str]:
    """Delete the folders to be collected. Return the deleted names, which are fewer if the fence was lost.

    `gone` is called with each deleted folder. If a deletion fails, the others still go ahead, and the OSError is raised
    at the end.
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
    """Parse strings of the form `<attempt>-<nonce>`. Other strings are ignored."""
    parts = [text.partition("-") for text in texts]
    return {(int(attempt), nonce) for attempt, _, nonce in parts if attempt.isdecimal() and nonce}


def delete(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
    """Delete one checkpoint or its remains. If the fence is lost, delete nothing more and return False.

    The tombstone is published before any file is deleted and is itself deleted last. A crash at any point leaves
    either a whole checkpoint, or a folder that readers ignore and every collector recognizes as half-deleted.
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
