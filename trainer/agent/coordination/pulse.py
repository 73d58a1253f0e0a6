"""The coordinator's two rhythms: one that must not stop, and one that waits for files."""

import asyncio
from collections.abc import Awaitable, Callable

SECONDS = 1.0


class Pulse:
    """Calls `strong` every second whatever `weak`, which may hang on a file system for minutes, is waiting for."""

    def __init__(self, strong: Callable[[], None], weak: Callable[[], Awaitable[None]]) -> None:
        self._strong, self._weak = strong, weak
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._beat_strongly()), loop.create_task(self._beat_weakly())]

    def check(self) -> None:
        """Raise what ended either rhythm: the coordinator must not go on in silence."""
        for task in self._tasks:
            if task.done():
                task.result()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _beat_strongly(self) -> None:
        while True:
            self._strong()
            await asyncio.sleep(SECONDS)

    async def _beat_weakly(self) -> None:
        while True:
            await self._weak()
            await asyncio.sleep(SECONDS)
