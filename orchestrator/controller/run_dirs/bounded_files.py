"""Run directories, read and written with a bound: one that hangs costs its own run alone, and only once.

A thread that waits for a dead file server cannot be ended. It is left behind, and nothing else is begun in that run's
directory before it has come back: what it was to write can so never overtake what is written later.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator.controller.run_dirs.run_folder import ForeignFolder, in_own_folder
from orchestrator.errors import OrchError
from orchestrator.registry.file_systems import mount_of

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds for which one directory is waited for; doubled for one that has answered late, up to `LONGEST`."""
LONGEST = 20.0
HURRIED = 0.5
"""The same for a directory of a file system on which another one hangs already."""
MOST_STUCK = 32
"""Threads left behind on one file system; its other runs wait until one of them comes back."""
_SLICE = 1.0


class RunDirHangs(OrchError):
    """A run directory that gives no answer, or is another user's; whether what was begun there gets done is unknown."""

    exit_code = 4


class Files(Protocol):
    """How the controller touches run directories."""

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        """The value of `work`, which touches files of the run at `folder`; raises what it raises, or RunDirHangs."""
        ...


class DirectFiles:
    """Without a bound: for programs that a person waits for."""

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        try:
            return in_own_folder(folder, work)
        except ForeignFolder as error:
            raise RunDirHangs(str(error), where=str(folder)) from error


@dataclass(eq=False)
class _Job:
    """Some work in a thread of its own."""

    work: Callable[[], Any]
    began: float
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:  # noqa: BLE001  # outermost edge of this thread: raised where it is waited for
            self.error = error
        self.done.set()


class _Worker:
    """One thread that does one job after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="orch-run-files", daemon=True).start()

    def begin(self, job: _Job) -> None:
        self._jobs.put(job)

    def leave(self) -> None:
        """End after the job that it is at."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class BoundedFiles:
    """Waits for so long and no longer; `between` is called every second meanwhile, and may raise."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.between = between
        self._worker: _Worker | None = None
        self._stuck: dict[Path, _Job] = {}
        self._patience: dict[Path, float] = {}

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        self._refuse_stuck(folder)
        job = _Job(lambda: in_own_folder(folder, work), time.monotonic())
        worker = self._worker = self._worker or _Worker()
        worker.begin(job)
        limit = patience or self._patience_with(folder)
        try:
            while not job.done.wait(max(0.0, min(_SLICE, limit))):
                limit -= _SLICE
                if limit <= 0:
                    raise self._left_behind(folder, job)
                self.between()
        finally:
            if not job.done.is_set():
                self._stuck[folder], self._worker = job, None
                worker.leave()
        if isinstance(job.error, ForeignFolder):
            raise RunDirHangs(str(job.error), where=str(folder)) from job.error
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _refuse_stuck(self, folder: Path) -> None:
        """Nothing is begun where something has not come back, nor on a file system where too much has not."""
        for path in [path for path, job in self._stuck.items() if job.done.is_set()]:
            del self._stuck[path]
        if (job := self._stuck.get(folder)) is not None:
            raise self._left_behind(folder, job)
        beside = self._stuck_beside(folder)
        if len(beside) >= MOST_STUCK:
            first = min(beside, key=lambda path: self._stuck[path].began)
            raise self._left_behind(first, self._stuck[first])

    def _patience_with(self, folder: Path) -> float:
        return HURRIED if self._stuck_beside(folder) else self._patience.get(folder, PATIENCE)

    def _stuck_beside(self, folder: Path) -> list[Path]:
        """Directories of the same file system that hang."""
        if not self._stuck:
            return []
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        own = mount_of(folder, text)
        return [path for path in self._stuck if mount_of(path, text) == own]

    def _left_behind(self, folder: Path, job: _Job) -> RunDirHangs:
        self._patience[folder] = min(LONGEST, 2 * self._patience.get(folder, PATIENCE))
        seconds = rounded(time.monotonic() - job.began)
        return RunDirHangs(f"the run directory does not answer for {seconds} s: {folder}", where=str(folder))


def rounded(seconds: float) -> int:
    """Downwards, to what is worth a new line: whoever reads it is told every minute, not every second."""
    step = 60 if seconds >= 60 else 5
    return int(seconds) // step * step
