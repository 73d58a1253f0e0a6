"""Orders that run beside each other, each in a thread of its own, and the token that stops one."""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class CancelToken:
    """`cancel` ends an order's input and output between two blocks; `halt` makes it leave memory and arena alone too.

    A cancelled order still digests and vouches for its buffer: that copy is whole, and may be all that is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled, self._halted = threading.Event(), False
        self.settled = threading.Event()
        """Set once the order has no further use for the buffer's bytes, except to write them out."""

    def cancel(self) -> None:
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def sleep(self, seconds: float) -> None:
        """Sleep, or wake up at once when the order is cancelled."""
        self._cancelled.wait(seconds)

    def check(self) -> None:
        """Raise OSError (ECANCELED) once the order is cancelled."""
        if self._cancelled.is_set():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def halt(self) -> None:
        """When this returns, nothing that `unless_halted` guards will happen any more."""
        self._cancelled.set()
        with self._lock:
            self._halted = True

    def halted(self) -> bool:
        return self._halted

    def unless_halted(self, act: Callable[[], None]) -> None:
        """Act while no `halt` can come in between; do nothing after one."""
        with self._lock:
            if not self._halted:
                act()


class OrderThreads:
    """One thread per order: one that hangs in the kernel, on a dead disk, holds up none of the others."""

    def __init__(self) -> None:
        self._running: set[CancelToken] = set()
        self._readers: dict[CancelToken, str] = {}
        self._changed = threading.Condition()

    def start(self, act: Callable[[CancelToken], T], *, reads_memory_for: str = "") -> "Future[T]":
        """Start one; its future carries what it returns or raises.

        `reads_memory_for` is the place to which it writes what it reads in the arena.
        """
        cancel_token, future = CancelToken(), Future[T]()
        future.set_running_or_notify_cancel()  # a thread cannot be taken back; `cancel` here asks it to stop
        if reads_memory_for:
            self._readers[cancel_token] = reads_memory_for
        else:
            cancel_token.settled.set()
        self._running.add(cancel_token)
        # A daemon: a process that exits does not wait for a disk that never answers.
        thread = threading.Thread(target=self._run, args=(cancel_token, future, act), name="order", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no room for another thread
            self._end(cancel_token)
            raise
        return future

    def _run(self, cancel_token: CancelToken, future: "Future[T]", act: Callable[[CancelToken], T]) -> None:
        try:
            result = act(cancel_token)
        except Exception as error:  # noqa: BLE001  # outermost edge
            self._end(cancel_token)
            future.set_exception(error)
        else:
            self._end(cancel_token)
            future.set_result(result)

    def _end(self, cancel_token: CancelToken) -> None:
        cancel_token.settled.set()
        self._running.discard(cancel_token)
        with self._changed:
            self._readers.pop(cancel_token, None)
            self._changed.notify_all()

    def until_unread(self, place: str) -> None:
        """Return when no order is under way that brings what is in memory to this place; other places may hang."""
        with self._changed:
            self._changed.wait_for(lambda: place not in self._readers.values())

    def cancel(self) -> None:
        """Ask all of them to stop; returns at once."""
        for cancel_token in list(self._running):
            cancel_token.cancel()

    def quiesce(self, patience: float) -> None:
        """Cancel all, give digests `patience` seconds to end, then see to it that no record is published any more."""
        self.cancel()
        give_up = time.monotonic() + patience
        for cancel_token in list(self._running):
            cancel_token.settled.wait(max(0.0, give_up - time.monotonic()))
            cancel_token.halt()
