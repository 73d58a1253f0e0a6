"""Running what may hang (a file system, a driver) in a thread that nothing has to wait for, not even the exit."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_detached(function: Callable[[], T], seconds: float) -> T:
    """The value of `function`; raises TimeoutError when it is late, else what it raises.

    Not asyncio.to_thread: its threads are waited for when the interpreter ends.
    """
    return await asyncio.wait_for(start_detached(function), seconds)


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
