"""Running what may hang (a file system, a driver) in a thread that nothing has to wait for, not even the exit."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

SHORTEST_READ = 1.0


class HungFileSystem(OSError):
    """A file system that does not answer; the path is part of the message."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(f"the file system does not answer for {seconds:.0f} s: {path}")


async def run_detached(function: Callable[[], T], seconds: float) -> T:
    """The value of `function`; raises TimeoutError when it is late, else what it raises.

    Not asyncio.to_thread: its threads are waited for when the interpreter ends.
    """
    return await asyncio.wait_for(start_detached(function), seconds)


async def read_file(function: Callable[[], T], path: Path, seconds: float) -> T:
    """Return what `function` reads from `path`; raises HungFileSystem when that takes too long."""
    try:
        return await run_detached(function, seconds)
    except TimeoutError as error:
        raise HungFileSystem(path, seconds) from error


class RepeatedRead(Generic[T]):
    """A read that is repeated and may hang: never two at once, so that a dead file system costs one thread."""

    def __init__(self, function: Callable[[], T], path: Path) -> None:
        self._function, self._path = function, path
        self._reading: asyncio.Future[T] | None = None

    async def result(self, seconds: float) -> T:
        """Return a result that is newer than the last one; raises HungFileSystem after `seconds`.

        Every read has `SHORTEST_READ` seconds at least: a near deadline proves nothing about the file system.
        """
        seconds = max(seconds, SHORTEST_READ)
        if self._reading is None:
            self._reading = start_detached(self._function)
        await asyncio.wait([self._reading], timeout=seconds)
        if not self._reading.done():
            raise HungFileSystem(self._path, seconds)
        reading, self._reading = self._reading, None
        return reading.result()


def start_detached(function: Callable[[], T]) -> "asyncio.Future[T]":
    """The same without waiting for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():  # its caller waits no more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as caught:  # noqa: BLE001  # outermost edge of this thread: raised where it is awaited
            error = caught
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="orch-apart", daemon=True).start()
    return future
