"""Pins: checkpoints that somebody wants to keep, each a small file of its own in the folder `pins` beside them.

A file for each pin, not one for all: two people who pin at once cannot lose each other's.
"""

import contextlib
import json
from dataclasses import dataclass

from checkpointing.format.commit import parse_name
from checkpointing.storage.backends import Storage
from checkpointing.storage.durable import canonical

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
