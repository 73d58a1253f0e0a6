"""Durable writes: fsync and rename, reserved files for full disks, and folders under construction.

The process that builds a folder holds a lock on it, which the kernel releases when the process ends for any reason.
Locks may be local to one machine, so the folder's name contains the host name and only that host removes it.

A copy-on-write file system (btrfs, ZFS) may refuse a write even into reserved space. That error is raised.
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
    """Create a new folder in `parent`. Anything still under its name on exit is removed."""
    beginning = f".{stem}.{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())}."
    _sweep(parent, beginning)
    folder, descriptor = _create(parent, beginning, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _create(parent: Path, beginning: str, mode: int) -> tuple[Path, int]:
    """Return a draft folder and the descriptor that holds its lock."""
    while True:
        folder = parent / f"{beginning}{secrets.token_hex(4)}.tmp"
        folder.mkdir(mode)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # swept by another process before it was locked
        if _try_lock(descriptor, without_locks=True) and folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _sweep(parent: Path, beginning: str) -> None:
    """Remove drafts that dead processes on this machine left behind."""
    ours = re.compile(re.escape(beginning) + r"[0-9a-f]{8}\.tmp")
    for folder in parent.iterdir():
        if not ours.fullmatch(folder.name):
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # owned by another user, or already gone
        try:
            if _try_lock(descriptor, without_locks=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, *, without_locks: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks  # on a file system without locks, drafts are created but never swept
    return True


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def fsync_dir(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise naming(error, f"{folder}/") from None
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Durably create a folder and its missing parents. Others may be creating it at the same time."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    fsync_dir(folder.parent)


def fsync_file(path: Path) -> None:
    """Make the bytes of a file durable, regardless of which process wrote them, and drop them from the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        # A failed earlier fsync leaves pages that are marked clean but were never written.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise naming(error, path) from None
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` with `data` atomically, even across a power loss."""
    _replace(path, data, mode, durably=True)
    fsync_dir(path.parent)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` atomically for readers, but without fsync. Meant for files that are soon rewritten."""
    _replace(path, data, mode, durably=False)


def _replace(path: Path, data: bytes, mode: int, *, durably: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            if durably:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise naming(error, path) from None


def naming(error: OSError, path: Path | str) -> OSError:
    """Add the file's name to an error from a write or fsync, which does not name the file. Return the error."""
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
    """Return one line of JSON. Floats are written as by `repr`, non-finite ones as the strings nan, inf and -inf."""
    return _dumps(value, sort_keys=False)


def canonical(value: Any, errors: str = "strict") -> bytes:
    """Return the canonical bytes used for digests: JSON with sorted keys and no spaces, in UTF-8.

    With `errors="backslashreplace"`, lone surrogates become escapes of JSON, which a reader turns into the same text.
    """
    return _dumps(value, sort_keys=True).encode(errors=errors)


def _dumps(value: Any, *, sort_keys: bool) -> str:
    dumps = partial(json.dumps, allow_nan=False, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)
    try:
        return dumps(value)
    except ValueError:  # a non-finite number: rare, and replacing it costs more than everything else
        return dumps(_finite(value))


def number(value: float | str) -> float:
    """Return a float written by `dump_line`, including non-finite ones."""
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


def finite(value: object) -> float | None:
    """Return a finite number as a float, or None for anything else, including integers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """Return an integer that fits a 64-bit database column, or None for anything else."""
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


class NotAFile(OSError):
    """A path that is not a regular file of bounded size, so that reading it might never end."""


class _Rules(threading.local):
    """Rules that apply to the calling thread."""

    own_only = False


_rules = _Rules()


@contextmanager
def only_own_files() -> Iterator[None]:
    """Within the context, make `open_regular` refuse other users' files (except root's) in this thread."""
    before, _rules.own_only = _rules.own_only, True
    try:
        yield
    finally:
        _rules.own_only = before


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises NotAFile immediately for a FIFO, a device, a socket or a folder."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
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
"""Maximum size in bytes of a JSON file. A larger one was not written by this program."""


class NestedTooDeeply(ValueError):
    """JSON nested too deeply for the parser, which orch never writes."""


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Parse one JSON file of at most `most` bytes. Raises OSError or ValueError, with the path in the message."""
    with open_regular(path) as stream:
        # A read allocates its buffer first, so it is limited to the size of the file.
        data = stream.read(min(most, os.fstat(stream.fileno()).st_size) + 1)
    if len(data) > most:
        raise NotAFile(errno.EINVAL, f"is larger than {most} bytes", str(path))
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise NestedTooDeeply(f"{path} is not JSON: it is nested too deeply") from error


RESERVED_BYTES = 32 << 10


def reserve(path: Path, size: int = RESERVED_BYTES) -> None:
    """Reserve space for `write_reserved(path, ...)`. Raises OSError if the disk is full."""
    write_durably(_reserve_path(path), os.urandom(size))  # random, so that a compressing file system cannot shrink it


def write_reserved(path: Path, data: bytes) -> None:
    """Durably replace `path`. On a full disk, use the space reserved for it. Raises OSError."""
    room = _reserve_path(path)
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
    """Replace a JSON file atomically, without fsync. On a full disk, overwrite it in place.

    Raises OSError. After an overwrite, a reader may see a torn file, which it treats as missing.
    """
    try:
        write_atomically(path, data)
    except OSError as error:
        # Padded with spaces, so that no old contents remain after the new ones.
        if error.errno not in FULL or not _overwrite(path, data.ljust(file_size(path)), shrink=False):
            raise


def _reserve_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def file_size(path: Path) -> int:
    """Return the size in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _overwrite(path: Path, data: bytes, *, shrink: bool = True) -> bool:
    """Overwrite an existing file; return False if it does not exist or cannot hold the data. Raises OSError."""
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
