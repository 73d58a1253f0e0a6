"""One tier whose disk may never answer: every access has a time limit."""

import errno
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from checkpointing.tiers.tier import ResolvedTier
from checkpointing.writer.order_threads import OrderThreads

P = ParamSpec("P")
T = TypeVar("T")


class BoundedTier:
    """One rank's accesses to a tier: nobody waits for one that hangs, and no other begins before it has ended."""

    def __init__(self, tier: ResolvedTier, seconds: float) -> None:
        """`seconds` limit one access to names and markers."""
        self.tier, self._seconds, self._threads = tier, seconds, OrderThreads()
        self._abandoned: Future[Any] | None = None

    @property
    def stuck(self) -> bool:
        """Whether an abandoned access is still under way."""
        return self._abandoned is not None and not self._abandoned.done()

    def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `act` in a thread of its own; raises what it raises, or OSError (ETIMEDOUT)."""
        return self.run_within(self._seconds, lambda: act(*args, **kwargs))

    def run_within(self, seconds: float, act: Callable[[], T]) -> T:
        """As `run`, with another limit."""
        self.check()
        future = self._threads.start(lambda _: act())
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # its own error
                raise
        self.abandon(future)
        raise OSError(errno.ETIMEDOUT, f"{self.tier.path} has not answered for {seconds:.0f} s")

    def abandon(self, future: "Future[Any]") -> None:
        """Stop waiting for an access; nothing else begins here before it has ended."""
        self._abandoned = future

    def check(self) -> None:
        """Raises OSError (ETIMEDOUT) while an abandoned access is still under way."""
        if self.stuck:
            raise OSError(errno.ETIMEDOUT, f"{self.tier.path} has still not answered an earlier access")
