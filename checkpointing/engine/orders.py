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
        self._readers: dict[Ticket, str] = {}
        self._changed = threading.Condition()

    def begin(self, act: Callable[[Ticket], T], *, reads_memory_for: str = "") -> "Future[T]":
        """Start one; its future carries what it returns or raises.

        `reads_memory_for` is the place to which it writes what it reads in the arena.
        """
        ticket, future = Ticket(), Future[T]()
        future.set_running_or_notify_cancel()  # a thread cannot be taken back; `cancel` here asks it to stop
        if reads_memory_for:
            self._readers[ticket] = reads_memory_for
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
            self._readers.pop(ticket, None)
            self._changed.notify_all()

    def until_unread(self, place: str) -> None:
        """Return when no order is under way that brings what is in memory to this place; other places may hang."""
        with self._changed:
            self._changed.wait_for(lambda: place not in self._readers.values())

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
