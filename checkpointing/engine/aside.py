"""Acts on a disk that may never answer, done beside the thread that asks for them."""

import errno
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from checkpointing.engine.orders import Orders

T = TypeVar("T")


class Aside:
    """The accesses of one rank to one tier: one that hangs ends the waiting, and the next ones are not even begun."""

    def __init__(self, path: str) -> None:
        self._path, self._orders = path, Orders()
        self._late: Future[Any] | None = None

    @property
    def stuck(self) -> bool:
        """Whether an access that was given up is still under way."""
        return self._late is not None and not self._late.done()

    def run(self, act: Callable[[], T], patience: float) -> T:
        """Do `act`, for at most `patience` seconds; raises what it raises, or OSError (ETIMEDOUT)."""
        self.check()
        return self.settle(self._orders.begin(lambda _: act()), patience)

    def settle(self, future: "Future[T]", patience: float) -> T:
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
        self._late = future

    def check(self) -> None:
        """Raise OSError (ETIMEDOUT) while an access that was given up is still under way."""
        if self.stuck:
            raise OSError(errno.ETIMEDOUT, f"{self._path} has still not answered an earlier access")
