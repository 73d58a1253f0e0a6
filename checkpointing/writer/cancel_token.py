"""How one order is told to stop, from another thread."""

import errno
import os
import threading
from collections.abc import Callable


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
