"""Run directories on a file system that hangs for a while."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.run_dirs.bounded_files import DirectFiles, RunDirHangs

T = TypeVar("T")


class HungFiles(DirectFiles):
    """Files that hang for the runs in `hung` and work for all others."""

    def __init__(self) -> None:
        self.hung: set[Path] = set()

    def call(self, folder: Path, work: Callable[[], T], patience: float | None = None) -> T:
        if folder in self.hung:
            raise RunDirHangs(f"the run directory has not answered for 5 s: {folder}")
        return work()
