"""Log rotation: a full log file is rotated, and only a log's newest files are kept.

`rank-00003.log` is the current file. When it is full, it becomes `rank-00003.log.1`, the next file
`rank-00003.log.2`, and so on. A rotated file is never renamed again, and the oldest files are deleted.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from checkpointing.storage.durable import open_regular
from trainer.protocol.time_spans import parse_span


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """Log retention for each rank, agent and controller, at most `max_mib` x `keep`, and rank 0's progress lines."""

    max_mib: float = 16.0
    """Maximum size of a log file in MiB, at which orch rotates it."""
    keep: int = 4
    """Number of files kept for each log, including the current file."""
    every: int | str = "10s"
    """Interval between progress lines in rank 0's log: `10s`, `1m`, or a number of steps; 0: no lines."""

    def __post_init__(self) -> None:
        seconds = parse_span(self.every) if isinstance(self.every, str) else float(self.every)
        if seconds is None or seconds < 0:
            raise ValueError(f"logs.every={self.every}: must be a time (10s, 1m), a number of steps, or 0 for none")
        if not 0.001 <= self.max_mib < math.inf:
            raise ValueError(f"logs.max_mib={self.max_mib}: must be at least 0.001")
        if self.keep < 1:
            raise ValueError(f"logs.keep={self.keep}: must be at least 1")

    @property
    def max_bytes(self) -> int:
        return int(self.max_mib * (1 << 20))


def rotated_files(path: Path) -> dict[int, Path]:
    """Return the rotated files of a log, keyed by number, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    try:
        found = {int(match[1]): path.parent / match[0] for name in os.listdir(path.parent)
                 if (match := pattern.fullmatch(name))}  # fmt: skip
    except OSError:
        found = {}
    return dict(sorted(found.items()))


def log_files(path: Path) -> list[Path]:
    """Return all files of a log, oldest first."""
    return [*rotated_files(path).values(), *([path] if path.exists() else [])]


def read_tail(path: Path, nbytes: int) -> bytes:
    """Return the last bytes of a log, across its files. Raises FileNotFoundError for a missing log."""
    parts: list[bytes] = []
    seen: set[int] = set()
    for file in _opened_newest_first(path):
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino in seen:  # rotated after it was opened
                continue
            seen.add(status.st_ino)
            file.seek(max(0, status.st_size - nbytes))
            parts.insert(0, file.read(nbytes))
        nbytes -= len(parts[0])
        if nbytes <= 0:
            break
    if not parts:
        raise FileNotFoundError(f"there is no log {path}")
    return b"".join(parts)


def _opened_newest_first(path: Path) -> Iterator[BinaryIO]:
    # Start with the current file: if it is rotated in the meantime, it is found twice instead of missed.
    with suppress(FileNotFoundError):
        yield open_regular(path)
    for old in reversed(rotated_files(path).values()):
        with suppress(FileNotFoundError):  # deleted in the meantime
            yield open_regular(old)


def read_files(path: Path) -> Iterator[bytes]:
    """Yield the content of each log file, oldest first. Concurrent rotation neither skips nor repeats a file."""
    last = 0
    while True:
        rotated = {number: file for number, file in rotated_files(path).items() if number > last}
        if rotated:
            last = min(rotated)
            yield _read(rotated[last])
            continue
        current = _read(path)
        if max(rotated_files(path), default=0) <= last:
            yield current
            return


class LogFile:
    """Writer that appends to a log and rotates it. The log's folder must exist."""

    def __init__(self, path: Path, limits: LogsConfig) -> None:
        """Open the log. Raises OSError."""
        self.path, self.limits = path, limits
        self._open()

    def _open(self) -> None:
        # Without O_NONBLOCK, opening a FIFO waits for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append `data`, ending files with whole lines if possible. Raises OSError, possibly after a partial write."""
        while data:
            part = self._fitting(data)
            written = os.write(self._descriptor, part) if part else 0
            self._size += written
            data = data[written:]
            if data and written == len(part):
                self._rotate()

    def _fitting(self, data: bytes) -> bytes:
        room = max(0, self.limits.max_bytes - self._size)
        if len(data) <= room:
            return data
        lines = data.rfind(b"\n", 0, room) + 1
        return data[: lines or (0 if self._size else room)]

    def _rotate(self) -> None:
        numbers = list(rotated_files(self.path))
        number = max(numbers, default=0) + 1
        with suppress(FileNotFoundError):  # deleted by someone else
            os.rename(self.path, self.path.with_name(f"{self.path.name}.{number}"))
        full = self._descriptor
        self._open()
        # WARNING: close it only now. Without a new file, the next write would go to whatever reuses the descriptor.
        os.close(full)
        for old in [*numbers, number]:
            if old <= number - (self.limits.keep - 1):
                self.path.with_name(f"{self.path.name}.{old}").unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._descriptor)


class LogReader:
    """Reader of data appended to a log, across rotations."""

    def __init__(self, path: Path, lines: int | None) -> None:
        """Start `lines` lines before the end, or at the oldest line kept if None. Raises OSError."""
        self._path = path
        self._file = FileIO(path)
        rotated, mine = rotated_files(path), os.fstat(self._file.fileno()).st_ino
        just_now = [number for number, file in rotated.items() if _inode(file) == mine]
        self._number = just_now[0] if just_now else max(rotated, default=0) + 1  # its number once it is rotated
        old = [file for number, file in rotated.items() if number < self._number]
        self._found = self._file.read() or b""
        # Older files are read only as far as needed.
        while old and (lines is None or self._found.count(b"\n") <= lines):
            self._found = _read(old.pop()) + self._found
        if lines is not None:
            self._found = _last(self._found, lines)

    def read(self) -> bytes:
        """Return whatever still exists of the data appended since the last read."""
        found, self._found = self._found + (self._file.read() or b""), b""
        while not self._is_current():
            # WARNING: data may be appended until the rotation, so more may have arrived since the last read.
            found += self._file.read() or b""
            if not self._advance():
                break
            found += self._gap + (self._file.read() or b"")
        return found

    def _newer(self) -> dict[int, Path]:
        return {number: file for number, file in rotated_files(self._path).items() if number > self._number}

    def _is_current(self) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:  # rotation in progress
            return True

    def _advance(self) -> bool:
        """Advance to the next file. Return False if it was deleted in the meantime."""
        while True:
            newer = self._newer()
            number = min(newer, default=max(rotated_files(self._path), default=self._number) + 1)
            try:
                successor = FileIO(newer.get(number, self._path))
            except FileNotFoundError:
                return False
            if newer or not self._newer():
                break
            successor.close()  # two files were rotated in the meantime: continue with the first
        self._gap = b"[orch: lines are missing here: they were deleted before they were read]\n"
        self._gap = self._gap if number > self._number + 1 else b""
        self._file.close()
        self._file, self._number = successor, number
        return True

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


def _last(text: bytes, lines: int) -> bytes:
    """Return the last whole lines and any partial line after them."""
    whole, mark, rest = text.rpartition(b"\n")
    kept = whole.split(b"\n")[-lines:] if lines and mark else []
    return b"".join(line + b"\n" for line in kept) + rest


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
