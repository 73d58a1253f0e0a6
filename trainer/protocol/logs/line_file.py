"""Files of lines that several processes append to, and the ranks' work log."""

import errno
import json
import os
from pathlib import Path
from typing import Any, Protocol

from checkpointing.storage.durable import open_regular
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use


class Lines(Protocol):
    """Ordered sink of whole lines."""

    def append(self, line: str, /) -> None: ...

    def close(self) -> None: ...


class LineFile:
    """Writer of whole lines, each in one O_APPEND write, so that processes on one host may share the file.

    Secret values never reach the file. A line truncated by a full disk or a kill does not corrupt the next line,
    even if another process writes it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, line: str) -> None:
        """Write `line` and a newline. Raises OSError if it was not written in full."""
        shown = in_use().record(line).encode(errors="backslashreplace")
        data = (b"\n" if self._is_torn() else b"") + shown + b"\n"
        written = os.write(self._descriptor, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes arrived")

    def _is_torn(self) -> bool:
        # This may see another process's unfinished line, which adds only an empty line. Readers skip it.
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def sync(self) -> None:
        """Make appended lines durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


MAX_READ_BYTES = 64 << 20
"""Maximum number of bytes read per call. The rest is left for the next call."""


def read_new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """Return whole lines from byte `offset` on, and the next offset. A torn last line is left for the next call.

    Raises OSError, including for a file that is not regular.
    """
    try:
        with open_regular(path) as stream:
            stream.seek(offset)
            block = stream.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return [], offset
    end = block.rfind(b"\n") + 1
    if not end and len(block) == MAX_READ_BYTES:
        return [], offset + len(block)  # orch never writes a line that long
    return block[:end].splitlines(), offset + end


def work_lines(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Return all whole lines of all ranks, in step order for each rank. Torn lines are skipped."""
    found = []
    for path in attempt.work_logs():
        for line in read_new_lines(path, 0)[0]:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return found
