"""Orders that run beside each other, each in a thread of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from checkpointing.engine.ticket import Ticket

T = TypeVar("T")


class Orders:
    """One thread per order: one that hangs in the kernel, on a dead disk, holds up none of the others."""

    def __init__(self) -> None:
        self._running: set[Ticket] = set()
        self._readers: set[Ticket] = set()
        self._changed = threading.Condition()

    def begin(self, act: Callable[[Ticket], T], *, reads_memory: bool = False) -> "Future[T]":
        """Start one; its future carries what it returns or raises."""
        ticket, future = Ticket(), Future[T]()
        future.set_running_or_notify_cancel()  # a thread cannot be taken back; `cancel` here asks it to stop
        if reads_memory:
            self._readers.add(ticket)
        else:
            ticket.settled.set()
        self._running.add(ticket)
        # A daemon: a process that leaves does not wait for a disk that never answers.
        thread = threading.Thread(target=self._run, args=(ticket, future, act), name="order", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no room for another thread
            self._end(ticket)
            raise
        return future

    def _run(self, ticket: Ticket, future: "Future[T]", act: Callable[[Ticket], T]) -> None:
        try:
            result = act(ticket)
        except Exception as error:  # noqa: BLE001  # outermost edge
            self._end(ticket)
            future.set_exception(error)
        else:
            self._end(ticket)
            future.set_result(result)

    def _end(self, ticket: Ticket) -> None:
        ticket.settled.set()
        self._running.discard(ticket)
        with self._changed:
            self._readers.discard(ticket)
            self._changed.notify_all()

    def until_unread(self) -> None:
        """Return when no order that reads the memory is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)

    def cancel(self) -> None:
        """Ask all of them to stop; returns at once."""
        for ticket in list(self._running):
            ticket.cancel()

    def quiesce(self, patience: float) -> None:
        """Cancel all, give digests `patience` seconds to end, then see to it that no record is published any more."""
        self.cancel()
        give_up = time.monotonic() + patience
        for ticket in list(self._running):
            ticket.settled.wait(max(0.0, give_up - time.monotonic()))
            ticket.halt()
