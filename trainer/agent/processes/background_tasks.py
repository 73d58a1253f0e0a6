"""Background work of an agent: detached threads, supervised tasks and write-behind files."""

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SHORTEST_READ = 1.0


class HungFileSystem(OSError):
    """Raised if a file system does not respond; the message includes the path."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(f"the file system has not responded for {seconds:.0f} s: {path}")


async def run_detached(function: Callable[[], T], seconds: float) -> T:
    """Return the value of `function`. Raises TimeoutError if it is late, and passes on any exception from it.
    asyncio.to_thread is not used, because at exit the interpreter waits for its threads.
    """
    return await asyncio.wait_for(start_detached(function), seconds)


async def read_file(function: Callable[[], T], path: Path, seconds: float) -> T:
    """Return what `function` reads from `path`. Raises HungFileSystem if that takes too long."""
    try:
        return await run_detached(function, seconds)
    except TimeoutError as error:
        raise HungFileSystem(path, seconds) from error


class RepeatedRead(Generic[T]):
    """A repeated read that may hang. At most one runs at a time, so a dead file system ties up only one thread."""

    def __init__(self, function: Callable[[], T], path: Path, clock: Callable[[], float] | None = None) -> None:
        self._function, self._path, self._clock = function, path, clock or time.monotonic
        self._reading: asyncio.Future[T] | None = None
        self.began_at = float("-inf")
        """Start of the last read by `poll`."""

    async def result(self, seconds: float) -> T:
        """Return a result that is newer than the last one. Raises HungFileSystem after `seconds`.
        Every read gets at least `SHORTEST_READ` seconds; a deadline that is too close proves nothing about the file
        system.
        """
        seconds = max(seconds, SHORTEST_READ)
        if self._reading is None:
            self._reading = start_detached(self._function)
        await asyncio.wait([self._reading], timeout=seconds)
        if not self._reading.done():
            raise HungFileSystem(self._path, seconds)
        reading, self._reading = self._reading, None
        return reading.result()

    def poll(self, pause: float) -> "asyncio.Future[T] | None":
        """Return each finished read once. If none is running, start one, at least `pause` seconds after the last."""
        done = None
        if self._reading is None:
            if self._clock() - self.began_at >= pause:
                self._reading, self.began_at = start_detached(self._function), self._clock()
        elif self._reading.done():
            done, self._reading = self._reading, None
        return done

    def discard(self) -> None:
        """Ignore the result of a running read."""
        self._reading = None


def start_detached(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `function` in a detached thread and return a future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():  # the caller no longer waits
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as caught:  # noqa: BLE001  # outermost edge of this thread: raised on await
            error = caught
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="orch-apart", daemon=True).start()
    return future


Task = asyncio.Task[None]
_MAX_PRINTED = 20
"""Maximum number of tracebacks printed, since a failing callback may be called again immediately."""


class SupervisedTasks:
    """Tasks that end with their owner. An exception in a task reaches the event loop's exception handler."""

    def __init__(self) -> None:
        self._tasks: set[Task] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> Task:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def report_exceptions(on_error: Callable[[BaseException], None]) -> None:
    """Call `on_error`, in the event loop, for every exception raised in a callback, task or thread."""
    loop, left = asyncio.get_running_loop(), _MAX_PRINTED

    def show(error: BaseException) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            sys.stderr.write("orch-agent: " + "".join(traceback.format_exception(error)))

    def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # An abandoned future may fail later without harming the agent.
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
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {message}{place}"


MOST_TEXTS = 10_000
MOST_CHARACTERS = 16 << 20
"""Limits on the text that may wait for a hung file; text beyond them is lost."""

CLOSE_SECONDS = 5.0
"""Maximum time by which a hung file may delay the exit."""


class WriteBehind:
    """Writer that keeps the order of `append` calls and writes immediately while the file responds. It never raises
    OSError. `write` and `close` may block, and run only in the writer's thread. `lost` is called with every text that
    could not be written, and the reason. If several texts in a row do not fit, it is called only for the first.
    """

    def __init__(
        self, write: Callable[[str], object], lost: Callable[[str, str], object],
        close: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._write, self._lost, self._close_file = write, lost, close
        self._texts: deque[str] = deque()  # includes the text being written
        self._characters = 0
        self._full = self._closed = False
        # Reentrant, as Condition is by default: the garbage collector may log in the middle of anything.
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="orch-behind", daemon=True).start()

    def append(self, text: str) -> None:
        """Queue `text` for writing and return immediately."""
        with self._news:
            was_full, why = self._full, self._refusal()
            if not why:
                self._texts.append(text)
                self._characters += len(text)
                self._news.notify_all()
        if why and not was_full:
            self._lost(text, why)

    def _refusal(self) -> str:
        """Return why no more text is accepted, or "" if text is accepted."""
        if self._closed:
            return "the writer is closed"
        # Once full, it accepts nothing until everything is written, so gaps are few and each is reported.
        if len(self._texts) >= MOST_TEXTS or self._characters >= MOST_CHARACTERS:
            self._full = True
        return "too much text waits for a hung file; further text is lost until the file responds" if self._full else ""

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` for everything to be written, and return whether it was."""
        with self._news:
            return self._news.wait_for(lambda: not self._texts, seconds)

    def close(self, seconds: float | None = None) -> None:
        """Flush, then leave it to the thread to write the rest and close the file."""
        done = self.flush(CLOSE_SECONDS if seconds is None else seconds)
        with self._news:
            self._closed = True
            left = list(self._texts)
            self._news.notify_all()
        if not done and left:
            self._lost(left[0], f"its file hung at exit; {len(left) - 1} later texts are also lost")

    def _run(self) -> None:
        while (text := self._next()) is not None:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # ValueError: a closed stream
                self._lost(text, str(error))
            with self._news:
                self._texts.popleft()
                self._characters -= len(text)
                self._full = self._full and bool(self._texts)
                self._news.notify_all()
        self._close_file()

    def _next(self) -> str | None:
        with self._news:
            self._news.wait_for(lambda: self._texts or self._closed)
            return self._texts[0] if self._texts else None


def settle(all_of_them: Iterable[WriteBehind], seconds: float = CLOSE_SECONDS) -> None:
    """Close all writers within `seconds` in total."""
    give_up = time.monotonic() + seconds
    for one in all_of_them:
        one.close(max(0.0, give_up - time.monotonic()))
