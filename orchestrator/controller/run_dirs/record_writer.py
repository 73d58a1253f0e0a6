"""The records in the run directories, written behind every commit: one that hangs is owed, and tried again later."""

import time

from orchestrator.controller.run_dirs.bounded_files import Files, RunDirHangs
from orchestrator.registry.operations.reads import Reads
from orchestrator.registry.operations.run_record import Record, write_record, write_records
from trainer.contract.run_dir import RunDir

AGAIN = 10.0
"""Seconds between two tries for a directory that hangs."""


class RecordWriter:
    """To be called after every commit with the names of the runs that it changed."""

    def __init__(self, store: Reads, files: Files) -> None:
        self._store, self._files = store, files
        self._owed: set[str] = set()
        self._tried_at = 0.0

    def __call__(self, runs: set[str]) -> None:
        """Write the records of these runs, and now and then those that are owed."""
        now = time.monotonic()
        if self._owed and now - self._tried_at >= AGAIN:
            self._tried_at, runs, self._owed = now, runs | self._owed, set()
        write_records(self._store, runs, self._write)

    def _write(self, folder: RunDir, record: Record) -> None:
        try:
            self._files.call(folder.path, lambda: write_record(folder, record))
        except RunDirHangs:
            self._owed.add(record.run.name)
