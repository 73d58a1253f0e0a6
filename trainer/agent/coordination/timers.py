"""The coordinator's two rhythms: one that must not stop, and one that waits for files."""

import asyncio
from collections.abc import Awaitable, Callable

SECONDS = 1.0


class Timers:
    """Calls `strong` every second whatever `weak`, which may hang on a file system for minutes, is waiting for."""

    def __init__(self, tick: Callable[[], None], file_tick: Callable[[], Awaitable[None]]) -> None:
        self._tick, self._file_tick = tick, file_tick
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run_ticks()), loop.create_task(self._run_file_ticks())]

    def check(self) -> None:
        """Raise what ended either rhythm: the coordinator must not go on in silence."""
        for task in self._tasks:
            if task.done():
                task.result()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run_ticks(self) -> None:
        while True:
            self._tick()
            await asyncio.sleep(SECONDS)

    async def _run_file_ticks(self) -> None:
        while True:
            await self._file_tick()
            await asyncio.sleep(SECONDS)
