"""Small files that must be written even when the disk is full: their room is taken beforehand.

A file system that never overwrites in place (btrfs, ZFS) may refuse all the same; then the error is raised as ever.
"""

import os
from pathlib import Path

from checkpointing.storage.disk_errors import FULL
from checkpointing.storage.durable import fsync_dir, write_atomically, write_durably

RESERVED_BYTES = 32 << 10


def reserve(path: Path, size: int = RESERVED_BYTES) -> None:
    """Take room for `write_reserved(path, ...)`; raises OSError when there is none."""
    write_durably(_reserve_of(path), os.urandom(size))  # a file system that compresses must not shrink it


def write_reserved(path: Path, data: bytes) -> None:
    """Replace `path` durably; on a full disk in the room that was reserved for it. Raises OSError."""
    room = _reserve_of(path)
    try:
        write_durably(path, data)
    except OSError as error:
        if error.errno not in FULL or not _overwrite(room, data):
            raise
        os.replace(room, path)
        fsync_dir(path.parent)
        return
    room.unlink(missing_ok=True)


def replace_or_overwrite(path: Path, data: bytes) -> None:
    """Replace a file of JSON for readers, without waiting for the disk; a full disk has it overwritten in place.

    Raises OSError. A reader may then see a torn file, which it takes for none.
    """
    try:
        write_atomically(path, data)
    except OSError as error:
        # Filled up with spaces: the old content's end must not follow the new one.
        if error.errno not in FULL or not _overwrite(path, data.ljust(_size(path)), shrink=False):
            raise


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _overwrite(path: Path, data: bytes, *, shrink: bool = True) -> bool:
    """Write over a file that is there; False when there is none, or it cannot hold the data. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if shrink and os.fstat(descriptor).st_size < len(data):
            return False
        if os.pwrite(descriptor, data, 0) < len(data):
            return False
        if shrink:
            os.ftruncate(descriptor, len(data))
            os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)
