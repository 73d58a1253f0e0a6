"""Files that survive a crash: write, fsync, rename, fsync the folder; JSON whose floats read back exactly."""

import errno
import json
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from checkpointing.storage.trusted_path import is_trusted, user_name

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
