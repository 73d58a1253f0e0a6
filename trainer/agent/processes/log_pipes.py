"""Output of a node's processes, read by the agent from pipes and written to rotated log files.
A process that writes to a file itself, such as a user's own program, could fill the disk. The agent also replaces
secret values with their names here, no matter which process printed them.
"""

import fcntl
import os
import select
import termios
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.agent.processes.log_rhythm import LogRhythm
from trainer.protocol.logs.log_rotation import LogFile, LogsConfig
from trainer.protocol.secrets.secret_redaction import RedactedStream

PIPE_BYTES = 1 << 20
_BLOCK = 1 << 18
MOST_WAITING = 32 << 20
"""Maximum bytes waiting for the file system; beyond that, processes that print block."""
STALL_SECONDS = 5.0
"""Seconds that processes block while the file system accepts nothing; later output is dropped."""


@dataclass
class _Log:
    """Log file and the pipe that leads to it; the file is created by the first write."""

    path: Path
    ours: int
    theirs: int
    lost: int = 0
    """Bytes dropped since the newest chunk."""
    unwritten: int = 0
    """Bytes of chunks not written since the last successful write; used only by the writing thread."""
    file: LogFile | None = field(default=None)
    redacted: RedactedStream = field(default_factory=RedactedStream)
    rhythm: LogRhythm = field(default_factory=LogRhythm)

    def write(self, data: bytes, limits: LogsConfig) -> None:
        if self.file is None:
            self.file = LogFile(self.path, limits)
        self.file.limits = limits
        self.file.write(data)


class LogPipes:
    """Logs of one node. Two threads handle them, so that a hung file system does not block processes that print."""

    def __init__(self, limits: LogsConfig | None = None, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._limits, self._stall_seconds = limits or LogsConfig(), stall_seconds
        self._logs: dict[Path, _Log] = {}
        self._by_descriptor: dict[int, _Log] = {}
        self._chunks: deque[tuple[_Log, bytes, int]] = deque()  # includes the chunk being written
        self._waiting = 0
        self._stalled = self._closed = False
        self._news = threading.Condition()
        self._poll = select.epoll()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="orch-logs", daemon=True).start()

    def limit(self, limits: LogsConfig) -> None:
        self._limits = limits

    def descriptor(self, path: Path) -> int:
        """Return the descriptor for processes to write to this log; kept open for the next process."""
        with self._news:
            if path not in self._logs:
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                with suppress(OSError):  # a user's total pipe memory is limited
                    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                self._logs[path] = self._by_descriptor[ours] = _Log(path, ours, theirs)
                self._poll.register(ours, select.EPOLLIN)
                self._chunks.append((self._logs[path], b"", 0))  # creates the file
                self._news.notify_all()
            theirs = self._logs[path].theirs
            os.set_blocking(theirs, True)  # shared by all writers, one of which may have changed it
            return theirs

    def rhythm(self, path: Path) -> tuple[float, float]:
        """Return the time of the newest print into this log (0: never) and the usual longest pause between two."""
        with self._news:
            log = self._logs.get(path)
            return (0.0, 0.0) if log is None else (log.rhythm.last, log.rhythm.usual_gap())

    def settle(self, path: Path, seconds: float) -> bool:
        """Wait at most `seconds` for all output so far to reach the log's file, and return whether it did."""
        deadline = time.monotonic() + seconds
        with self._news:
            if self._news.wait_for(lambda: self._is_written(path), seconds):
                self._release(path)
            return self._news.wait_for(lambda: self._is_written(path), deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        """Settle all logs within `seconds` in total, and close the write ends."""
        with self._news:
            deadline = time.monotonic() + seconds
            self._news.wait_for(lambda: all(map(self._is_written, self._logs)), seconds)
            for path in self._logs:
                self._release(path)
            self._news.wait_for(lambda: all(map(self._is_written, self._logs)), deadline - time.monotonic())
            self._closed = True
            self._news.notify_all()
            for log in self._logs.values():
                os.close(log.theirs)  # the reader sees the end of every pipe that no other process keeps open

    def _release(self, path: Path) -> None:
        """Queue the end of a log that was held back because it might have been the beginning of a secret."""
        if path in self._logs and self._logs[path].redacted.held:
            self._chunks.append((self._logs[path], b"", 0))
            self._news.notify_all()

    def _is_written(self, path: Path) -> bool:
        log = self._logs.get(path)
        return log is None or not (_unread(log.ours) or any(chunk[0] is log for chunk in self._chunks))

    # -- the two threads

    def _read(self) -> None:
        while not self._closed:
            for descriptor, _ in self._poll.poll(1.0):
                self._take(self._by_descriptor[descriptor])

    def _take(self, log: _Log) -> None:
        with self._news:
            # A process that is faster than the disk blocks, but only briefly if the disk does not respond.
            patience = 0.0 if self._stalled else self._stall_seconds
            has_room = self._news.wait_for(lambda: self._waiting < MOST_WAITING, patience)
            self._stalled = not has_room
            try:
                data = os.read(log.ours, _BLOCK)
            except BlockingIOError:
                return
            if data:
                log.rhythm.add(time.monotonic())
            if not data:
                self._poll.unregister(log.ours)
            elif has_room:
                self._chunks.append((log, data, log.lost))
                log.lost = 0
                self._waiting += len(data)
            else:
                log.lost += len(data)
            self._news.notify_all()

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._chunks or self._closed)
                if not self._chunks:
                    return
                log, data, lost = self._chunks[0]  # bytes lost before this chunk
            lost += log.unwritten
            # Text before a gap cannot be the beginning of a secret.
            cut = log.redacted.flush() if lost or not data else b""
            shown = cut + _gap(lost) + log.redacted.redact(data)
            try:
                log.write(shown, self._limits)
            except OSError:
                log.unwritten = lost + len(data)
            else:
                log.unwritten = 0
            with self._news:
                self._chunks.popleft()
                self._waiting -= len(data)
                self._stalled = False
                self._news.notify_all()


def _gap(lost: int) -> bytes:
    return f"\n[orch: {lost} bytes are missing here: they could not be written]\n".encode() if lost else b""


def _unread(descriptor: int) -> int:
    answer = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, answer)
    return int.from_bytes(answer, "little")
