"""Exit reports of ranks, sent in the order of the exits, each as soon as everything about it was read."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from trainer.contract.messages.agents import RankExit

Task = asyncio.Task[None]


class ExitReports:
    """The first exit matters most: no report is sent before those of earlier exits."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], Task]) -> None:
        """`spawn` starts a task that ends with its agent."""
        self._spawn = spawn
        self._last: Task | None = None

    def add(self, read: Callable[[], Awaitable[RankExit]], send: Callable[[RankExit], None]) -> None:
        """Read what is known of an exit now, and send it when its turn comes."""
        self._last = self._spawn(self._send(read, send, self._last))

    async def wait_until_sent(self) -> None:
        """Wait for all that were added so far."""
        await _wait(self._last)

    async def _send(
        self, read: Callable[[], Awaitable[RankExit]], send: Callable[[RankExit], None], before: Task | None
    ) -> None:
        known = await read()
        await _wait(before)
        send(known)


async def _wait(task: Task | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait([task])
