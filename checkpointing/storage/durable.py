"""Durable writes: fsync and rename, reserved files for full disks, and folders under construction.

The process that builds a folder holds a lock on it, which the kernel releases however the process ends. Locks may be
local to one machine, so the folder carries the machine's name and only that machine removes it.

A file system that never overwrites in place (btrfs, ZFS) may refuse a write into reserved room; the error is raised.
"""

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from checkpointing.storage.storage_errors import FULL
from checkpointing.storage.trusted_path import is_trusted, user_name


@contextmanager
def temporary_folder(parent: Path, stem: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in `parent`; what is still there under its name at the end goes."""
    beginning = f".{stem}.{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())}."
    _sweep(parent, beginning)
    folder, descriptor = _create(parent, beginning, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _create(parent: Path, beginning: str, mode: int) -> tuple[Path, int]:
    """A draft, and the descriptor that holds its lock."""
    while True:
        folder = parent / f"{beginning}{secrets.token_hex(4)}.tmp"
        folder.mkdir(mode)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # somebody swept it before it was locked
        if _locked(descriptor, without_locks=True) and folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _sweep(parent: Path, beginning: str) -> None:
    """Take away what makers of this machine have left whose end came too early."""
    ours = re.compile(re.escape(beginning) + r"[0-9a-f]{8}\.tmp")
    for folder in parent.iterdir():
        if not ours.fullmatch(folder.name):
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone already
        try:
            if _locked(descriptor, without_locks=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, *, without_locks: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks  # a file system without locks: drafts are made there, and none is swept
    return True


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def fsync_dir(folder: Path) -> None:
    """Make the names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise naming(error, f"{folder}/") from None
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and what is missing above it, durably; others may be creating it at the same time."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    fsync_dir(folder.parent)


def fsync_file(path: Path) -> None:
    """Make the bytes of a file durable, whoever wrote them, and forget them: they are next read from the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        # An earlier fsync that failed leaves pages that look written and are not.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise naming(error, path) from None
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` with `data` in one step that a power loss cannot tear."""
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise naming(error, path) from None
    fsync_dir(path.parent)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` in one step for readers, without waiting for the disk: for files that are soon written again."""
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise naming(error, path) from None


def naming(error: OSError, path: Path | str) -> OSError:
    """The error of a write or fsync, which names no file, with the file's name."""
    error.filename = error.filename or str(path)
    return error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def dump_line(value: Any) -> str:
    """One line of JSON: floats by `repr`, non-finite ones as the strings nan, inf, -inf."""
    return _dumps(value, sort_keys=False)


def canonical(value: Any) -> bytes:
    """The bytes a digest is taken of: sorted keys, no spaces, UTF-8."""
    return _dumps(value, sort_keys=True).encode()


def _dumps(value: Any, *, sort_keys: bool) -> str:
    dumps = partial(json.dumps, allow_nan=False, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)
    try:
        return dumps(value)
    except ValueError:  # a number that is not finite, which is rare: replacing them takes longer than all the rest
        return dumps(_finite(value))


def number(value: float | str) -> float:
    """A float as `dump_line` wrote it, non-finite ones included."""
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


def finite(value: object) -> float | None:
    """A finite number as a float; None for anything else, a whole number that no float can hold included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """A whole number that a database can hold (64 bits); None for anything else."""
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


class NotAFile(OSError):
    """Something else stands where a regular file of bounded size is expected: reading it might never end."""


class _Rules(threading.local):
    """What holds for the calling thread."""

    own_only = False


_rules = _Rules()


@contextmanager
def only_own_files() -> Iterator[None]:
    """While the context lasts, `open_regular` refuses in this thread what another user (but root) owns."""
    before, _rules.own_only = _rules.own_only, True
    try:
        yield
    finally:
        _rules.own_only = before


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raises NotAFile at once for a FIFO, a device, a socket or a folder."""
    # Without O_NONBLOCK the opening of a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    status = os.fstat(descriptor)
    kind = stat.S_IFMT(status.st_mode)
    foreign = _rules.own_only and not is_trusted(status.st_uid)
    if kind == stat.S_IFREG and not foreign:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if foreign:
        raise NotAFile(errno.EPERM, f"belongs to {user_name(status.st_uid)}", str(path))
    raise NotAFile(errno.EINVAL, f"is {_KINDS.get(kind, 'something else')}, not a regular file", str(path))


_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip
MOST_JSON = 1 << 30
"""Bytes of a JSON file beyond which it is nothing that was written here."""


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Parse one JSON file of at most `most` bytes; raises OSError or ValueError, with the path in the message."""
    with open_regular(path) as stream:
        # A read asks for the memory first: no more than what there is.
        data = stream.read(min(most, os.fstat(stream.fileno()).st_size) + 1)
    if len(data) > most:
        raise NotAFile(errno.EINVAL, f"is larger than {most} bytes", str(path))
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


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
