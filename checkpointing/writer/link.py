"""A rank's connection to its writer process, which turns orders into futures."""

import contextlib
import itertools
import os
import socket
import subprocess
import threading
from concurrent.futures import Future
from typing import Any

from checkpointing.format.manifest import FileEntry
from checkpointing.python_command import module_command
from checkpointing.tiers.copy_files import Copied, CopyOrder
from checkpointing.writer.arena import Arena
from checkpointing.writer.write_orders import MessageStream, WriteOrder, WriteResult, decode_error

_PATIENCE = 10.0
_LEAVE_SECONDS = 2.0


class WriterLost(ConnectionError):
    """The writer process is gone. Unreported writes are not durable, and the buffers are no longer read."""


class WriterLink:
    """Link to a writer process over a stream socket. It uses two descriptors in all: the socket's and the arena's.

    Every future completes with its result, with an OSError that keeps its errno, or with WriterLost if the process is
    gone. Once a `write` has completed in any of these ways, its buffer is no longer read.
    """

    def __init__(self, stream: socket.socket, arena: Arena, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.arena = arena
        self._messages, self._process = MessageStream(stream), process
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost = False
        self._reader = threading.Thread(target=self._read, name="writer-link", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, arena: Arena | None = None, label: str = "") -> "WriterLink":
        """Start a private writer over a new arena or the given one. It dies with this process.

        Returns while the process is still starting. A failed start is reported as WriterLost.
        """
        arena = arena if arena is not None else Arena.create()
        ours, theirs = socket.socketpair()
        command = [*module_command("checkpointing.writer.process"), "one"]
        command += [str(theirs.fileno()), str(arena.descriptor), str(os.getpid()), label]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno(), arena.descriptor], stdin=subprocess.DEVNULL)
        return cls(ours, arena, process)

    @classmethod
    def attach(cls, socket_fd: int, arena_fd: int, patience: float = _PATIENCE) -> "WriterLink":
        """Attach to a writer that another process owns. Both descriptors then belong to the link.

        Returns once no order of an earlier generation touches the arena. A writer that has just died is replaced by a
        private one over the same memory. Raises WriterLost if the writer does not answer; it may then still touch that
        memory at any time.
        """
        link = cls(socket.socket(fileno=socket_fd), Arena(arena_fd))
        try:
            link.ping().result(patience)
        except WriterLost:
            return link.replacement()
        except TimeoutError:
            link.close()
            raise WriterLost(f"the writer did not answer within {patience:.0f} s") from None
        return link

    def replacement(self) -> "WriterLink":
        """Close this link, whose writer is lost, and return one to a new private writer over the same arena."""
        self._disconnect()
        return WriterLink.start(self.arena)

    @property
    def alive(self) -> bool:
        """Whether the writer is still known to be running."""
        return not self._lost

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        """Write files out of a buffer, which must not change until the future is done."""
        return self._request({"do": "write", "order": order, "stamp": self.arena.stamp})

    def put(self, place: str, folder: str, name: str, blob: bytes) -> "Future[FileEntry]":
        """Write one small file durably, in parallel with other orders."""
        return self._request({"do": "put", "place": place, "folder": folder, "name": name}, blob)

    def copy(self, order: CopyOrder) -> "Future[Copied]":
        """Copy files of a checkpoint to another tier, in parallel with other orders."""
        return self._request({"do": "copy", "order": order})

    def ping(self) -> "Future[None]":
        """Return a future that completes when the writer answers, even if its disks hang."""
        return self._request({"do": "ping"})

    def warm(self) -> "Future[None]":
        """Make the writer map the arena's newest shape with all its pages before the first order."""
        return self._request({"do": "warm", "stamp": self.arena.stamp})

    def cancel(self) -> None:
        """Cancel the orders in flight, each between two blocks. Their futures fail with OSError (ECANCELED)."""
        self._request({"do": "cancel"})

    def _request(self, header: dict[str, Any], blob: bytes = b"") -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._lost:
                future.set_exception(WriterLost("the checkpoint writer is gone"))
                return future
            number = next(self._numbers)
            self._waiting[number] = future
        try:
            self._messages.send({"id": number, **header}, blob)
        except OSError:
            # Answers that have already been sent can still be read. The reader then sees the end of the stream and
            # fails the remaining futures.
            self._messages.disconnect()
        return future

    def _read(self) -> None:
        try:
            while (message := self._messages.receive()) is not None:
                self._settle(message[0])
        except (LookupError, TypeError, ValueError):
            self._messages.disconnect()  # a writer that sends malformed messages counts as lost
        with self._lock:
            self._lost, orphans = True, list(self._waiting.values())
            self._waiting.clear()
        for future in orphans:
            future.set_exception(WriterLost("the checkpoint writer is gone"))

    def _settle(self, header: dict[str, Any]) -> None:
        error = decode_error(header["fault"]) if "fault" in header else None
        result = None if error else header["result"]
        with self._lock:
            future = self._waiting.pop(header["id"])
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Abandon orders in flight and close the connection. A private writer process ends with it."""
        try:
            self._disconnect()
        finally:
            self.arena.close()

    def _disconnect(self) -> None:
        self._messages.disconnect()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._messages.close()
        if self._process is not None:
            try:
                self._process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                # A process that hangs in the kernel on a dead disk cannot be killed, so it is left behind.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LEAVE_SECONDS)
