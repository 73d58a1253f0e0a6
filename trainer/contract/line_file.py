"""Files of lines that several generations of a process append to, one write for each line."""

import errno
import os
from pathlib import Path
from typing import Protocol

from checkpointing.storage.durable import open_regular


class Lines(Protocol):
    """Where whole lines go, in order."""

    def append(self, line: str, /) -> None: ...

    def close(self) -> None: ...


class LineFile:
    """Appends to an O_APPEND descriptor; a line that a full disk has cut short never takes the next one with it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._torn = False

    def append(self, line: str) -> None:
        """Write `line` and a newline; raises OSError when not all of it arrived."""
        data = ("\n" if self._torn else "").encode() + line.encode(errors="backslashreplace") + b"\n"
        written = os.write(self._descriptor, data)
        self._torn = written < len(data) and (written > 0 or self._torn)
        if written < len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes arrived")

    def close(self) -> None:
        os.close(self._descriptor)


MAX_READ_BYTES = 64 << 20
"""Bytes of a file of lines that are read at once; the rest is left for the next call."""


def read_new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """Whole lines from byte `offset` on, and where to read on; a torn last line is left for the next call.

    Raises OSError, for what is no regular file, too.
    """
    try:
        with open_regular(path) as stream:
            stream.seek(offset)
            block = stream.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return [], offset
    end = block.rfind(b"\n") + 1
    if not end and len(block) == MAX_READ_BYTES:
        return [], offset + len(block)  # a line of that length is none of ours
    return block[:end].splitlines(), offset + end
