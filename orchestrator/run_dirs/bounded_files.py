"""Access to run directories with a timeout: a hanging directory delays only its own run, and only once.

A thread that waits for a dead file server cannot be stopped. It is left behind, and until it returns, no other work
starts in that run's directory, so that its writes cannot come after later ones.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator.errors import OrchError
from orchestrator.registry.file_systems import match_mount
from orchestrator.run_dirs.run_folder import ForeignFolder, in_own_folder

T = TypeVar("T")

PATIENCE = 5.0  # seconds to wait for one directory; doubled after a late answer, up to `LONGEST`
LONGEST = 20.0
HURRIED = 0.5  # seconds to wait for a directory on a file system where another one already hangs
MOST_STUCK = 32  # maximum threads left behind on one file system; its other runs wait until a thread returns
_SLICE = 1.0


class RunDirHangs(OrchError):
    """Raised if a run directory does not answer or belongs to another user. Work begun in it may still finish."""

    exit_code = 4


class Files(Protocol):
    """Access to run directories."""

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        """Return the result of `work` on files in `folder`. Raises RunDirHangs, or whatever `work` raises."""
        ...


class DirectFiles:
    """Access without a timeout, for commands in a terminal."""

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        try:
            return in_own_folder(folder, work)
        except ForeignFolder as error:
            raise RunDirHangs(str(error), where=str(folder)) from error


@dataclass(eq=False)
class _Job:
    """Work for a worker thread, and its result."""

    work: Callable[[], Any]
    began: float
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:  # noqa: BLE001  # outermost edge of this thread: re-raised in the waiting thread
            self.error = error
        self.done.set()


def _start_worker() -> "queue.SimpleQueue[_Job | None]":
    """Start a thread that runs jobs in sequence; return their queue, in which None ends the thread."""
    jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            job.run()

    threading.Thread(target=work, name="orch-run-files", daemon=True).start()
    return jobs


class BoundedFiles:
    """Access with a timeout. `between` is called every second during a wait, and may raise."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.between = between
        self._worker: queue.SimpleQueue[_Job | None] | None = None
        self._stuck: dict[Path, _Job] = {}
        self._patience: dict[Path, float] = {}

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        self._refuse_stuck(folder)
        job = _Job(lambda: in_own_folder(folder, work), time.monotonic())
        worker = self._worker = self._worker or _start_worker()
        worker.put(job)
        limit = patience or (HURRIED if self._stuck_beside(folder) else self._patience.get(folder, PATIENCE))
        try:
            while not job.done.wait(max(0.0, min(_SLICE, limit))):
                limit -= _SLICE
                if limit <= 0:
                    raise self._left_behind(folder, job)
                self.between()
        finally:
            if not job.done.is_set():
                self._stuck[folder], self._worker = job, None
                worker.put(None)
        if isinstance(job.error, ForeignFolder):
            raise RunDirHangs(str(job.error), where=str(folder)) from job.error
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _refuse_stuck(self, folder: Path) -> None:
        """Raise RunDirHangs if earlier work in this folder, or too much work on its file system, is still pending."""
        for path in [path for path, job in self._stuck.items() if job.done.is_set()]:
            del self._stuck[path]
        if (job := self._stuck.get(folder)) is not None:
            raise self._left_behind(folder, job)
        beside = self._stuck_beside(folder)
        if len(beside) >= MOST_STUCK:
            first = min(beside, key=lambda path: self._stuck[path].began)
            raise self._left_behind(first, self._stuck[first])

    def _stuck_beside(self, folder: Path) -> list[Path]:
        if not self._stuck:
            return []
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        own = match_mount(folder, text)
        return [path for path in self._stuck if match_mount(path, text) == own]

    def _left_behind(self, folder: Path, job: _Job) -> RunDirHangs:
        self._patience[folder] = min(LONGEST, 2 * self._patience.get(folder, PATIENCE))
        seconds = round_seconds(time.monotonic() - job.began)
        return RunDirHangs(f"the run directory has not answered for {seconds} s: {folder}", where=str(folder))


def round_seconds(seconds: float) -> int:
    """Round down so that a message with this number changes every 5 s, or every minute from 60 s on."""
    step = 60 if seconds >= 60 else 5
    return int(seconds) // step * step
