"""Supervision of what runs in an agent: an exception of a task, a callback or a thread is reported."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

Task = asyncio.Task[None]
_MAX_PRINTED = 20
"""Maximum number of printed tracebacks: a failing callback may be called again at once."""


class SupervisedTasks:
    """Tasks that end with their owner; an exception in one reaches the exception handler of the event loop."""

    def __init__(self) -> None:
        self._tasks: set[Task] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> Task:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def cancel(self) -> None:
        """Cancel every task that still runs."""
        for task in self._tasks:
            task.cancel()


def report_exceptions(on_error: Callable[[BaseException], None]) -> None:
    """Have `on_error` called, in the event loop, for every exception that a callback, a task or a thread raises."""
    loop, left = asyncio.get_running_loop(), _MAX_PRINTED

    def show(error: BaseException) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            sys.stderr.write("orch-agent: " + "".join(traceback.format_exception(error)))

    def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # An abandoned future may fail later without harm to the agent.
        if not isinstance(error, BaseException) or isinstance(context.get("future"), asyncio.Future):
            loop.default_exception_handler(context)
            return
        show(error)
        on_error(error)

    def on_thread_error(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        show(error)
        loop.call_soon_threadsafe(on_error, error)

    loop.set_exception_handler(on_loop_error)
    threading.excepthook = on_thread_error


def describe_error(error: BaseException) -> str:
    """Return one line with the error's class, message and origin."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {message}{place}"
