"""The ends of ranks, told in their order: what is known of each is read meanwhile, for as long as that takes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Known = dict[str, Any]
Task = asyncio.Task[None]


class ExitReports:
    """The first death tells most: none is told before those that came before it."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], Task]) -> None:
        """`spawn` starts a task that ends with its agent."""
        self._spawn = spawn
        self._last: Task | None = None

    def add(self, read: Callable[[], Awaitable[Known]], send: Callable[[Known], None]) -> None:
        """Read what is known of an end now, and tell it when its turn comes."""
        self._last = self._spawn(self._send(read, send, self._last))

    async def wait_until_sent(self) -> None:
        """Wait for all that were added so far."""
        await _wait(self._last)

    async def _send(
        self, read: Callable[[], Awaitable[Known]], send: Callable[[Known], None], before: Task | None
    ) -> None:
        known = await read()
        await _wait(before)
        send(known)


async def _wait(task: Task | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait([task])
