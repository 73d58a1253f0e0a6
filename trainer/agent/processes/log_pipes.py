"""What the processes of a node print: read from pipes by their agent, and written to rotated log files.

A process that prints into a file itself cannot be kept from filling the disk, a user's own program least of all. And
here the values of secrets are replaced by their names, whoever has printed them.
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

from trainer.contract.logs.log_rotation import LogFile, LogsConfig
from trainer.contract.secrets.secret_redaction import RedactedStream

PIPE_BYTES = 1 << 20
_BLOCK = 1 << 18
MOST_WAITING = 32 << 20
"""Bytes that wait for the file system at most; then processes that print have to wait as well."""
STALL_SECONDS = 5.0
"""How long they wait when the file system takes nothing at all; what they print from then on is dropped."""


@dataclass
class _Log:
    """One log: the pipe that leads to it, and its file once something was written."""

    path: Path
    ours: int
    theirs: int
    lost: int = 0
    """Bytes that were dropped since the newest chunk."""
    unwritten: int = 0
    """Bytes of chunks since the last one that could be written; only the writing thread looks here."""
    file: LogFile | None = field(default=None)
    redacted: RedactedStream = field(default_factory=RedactedStream)

    def write(self, data: bytes, limits: LogsConfig) -> None:
        if self.file is None:
            self.file = LogFile(self.path, limits)
        self.file.limits = limits
        self.file.write(data)


class LogPipes:
    """The logs of one node; two threads, so that a file system that hangs stops no process that prints."""

    def __init__(self, limits: LogsConfig | None = None, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._limits, self._stall_seconds = limits or LogsConfig(), stall_seconds
        self._logs: dict[Path, _Log] = {}
        self._by_descriptor: dict[int, _Log] = {}
        self._chunks: deque[tuple[_Log, bytes, int]] = deque()  # the one that is being written included
        self._waiting = 0
        self._stalled = self._closed = False
        self._news = threading.Condition()
        self._poll = select.epoll()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="orch-logs", daemon=True).start()

    def limit(self, limits: LogsConfig) -> None:
        """Rotate by these limits from now on."""
        self._limits = limits

    def descriptor(self, path: Path) -> int:
        """The descriptor that a process writes to for this log; kept open for the next process."""
        with self._news:
            if path not in self._logs:
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                with suppress(OSError):  # a user may have only so much memory in pipes
                    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                self._logs[path] = self._by_descriptor[ours] = _Log(path, ours, theirs)
                self._poll.register(ours, select.EPOLLIN)
                self._chunks.append((self._logs[path], b"", 0))  # makes the file
                self._news.notify_all()
            theirs = self._logs[path].theirs
            os.set_blocking(theirs, True)  # all writers share this: one may have changed it for those after it
            return theirs

    def settle(self, path: Path, seconds: float) -> bool:
        """Wait until what was printed so far is in the log's file, for so long at most; whether it is."""
        deadline = time.monotonic() + seconds
        with self._news:
            if self._news.wait_for(lambda: self._is_written(path), seconds):
                self._release(path)
            return self._news.wait_for(lambda: self._is_written(path), deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        """Settle all logs, within `seconds` together, and close the ends that are written to."""
        with self._news:
            deadline = time.monotonic() + seconds
            self._news.wait_for(lambda: all(map(self._is_written, self._logs)), seconds)
            for path in self._logs:
                self._release(path)
            self._news.wait_for(lambda: all(map(self._is_written, self._logs)), deadline - time.monotonic())
            self._closed = True
            self._news.notify_all()
            for log in self._logs.values():
                os.close(log.theirs)  # the reader sees the end of every pipe that no other process holds

    def _release(self, path: Path) -> None:
        """Have the end of a log written that may have been the beginning of a secret."""
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
            # A process that prints faster than the disk writes waits, but not for long when the disk does not answer.
            patience = 0.0 if self._stalled else self._stall_seconds
            has_room = self._news.wait_for(lambda: self._waiting < MOST_WAITING, patience)
            self._stalled = not has_room
            try:
                data = os.read(log.ours, _BLOCK)
            except BlockingIOError:
                return
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
                log, data, lost = self._chunks[0]  # bytes that were lost before it
            lost += log.unwritten
            # What a gap has cut off is no beginning of anything.
            cut = log.redacted.flush() if lost or not data else b""
            shown = cut + _gap(lost) + log.redacted.feed(data)
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
    """Bytes in a pipe."""
    answer = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, answer)
    return int.from_bytes(answer, "little")
