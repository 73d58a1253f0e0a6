"""Acts on a disk that may never answer, done beside the thread that asks for them."""

import errno
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from checkpointing.writer.order_threads import OrderThreads

T = TypeVar("T")


class BoundedIO:
    """The accesses of one rank to one tier: one that hangs ends the waiting, and the next ones are not even begun."""

    def __init__(self, path: str) -> None:
        self._path, self._orders = path, OrderThreads()
        self._given_up: Future[Any] | None = None

    @property
    def stuck(self) -> bool:
        """Whether an access that was given up is still under way."""
        return self._given_up is not None and not self._given_up.done()

    def run(self, act: Callable[[], T], patience: float) -> T:
        """Do `act`, for at most `patience` seconds; raises what it raises, or OSError (ETIMEDOUT)."""
        self.check()
        return self.await_result(self._orders.start(lambda _: act()), patience)

    def await_result(self, future: "Future[T]", patience: float) -> T:
        """The end of something that was begun elsewhere, awaited like `run`."""
        try:
            return future.result(patience)
        except TimeoutError:
            if future.done():  # its own error
                raise
        self.give_up(future)
        raise OSError(errno.ETIMEDOUT, f"{self._path} has not answered for {patience:.0f} s")

    def give_up(self, future: "Future[Any]") -> None:
        """Wait for this one no longer; nothing else is begun here before it has ended."""
        self._given_up = future

    def check(self) -> None:
        """Raise OSError (ETIMEDOUT) while an access that was given up is still under way."""
        if self.stuck:
            raise OSError(errno.ETIMEDOUT, f"{self._path} has still not answered an earlier access")
