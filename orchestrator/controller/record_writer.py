"""Write run records into run directories after every commit. Large records and hanging directories are deferred."""

import time
from collections.abc import Callable

from orchestrator.registry.reads import Reads
from orchestrator.registry.run_record import RunRecord, write_record, write_records
from orchestrator.run_dirs.bounded_files import Files, RunDirHangs
from trainer.protocol.run_dir import RunDir

AGAIN = 10.0  # seconds between attempts to write to a hanging directory
RATE = 64 << 10  # average bytes per second for the record of one run; larger records are written less often


class RecordWriter:
    """Hook that is called after every commit with the names of changed runs; `write_owed` writes the rest."""

    def __init__(self, store: Reads, files: Files, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._files, self._clock = store, files, clock
        self._owed: set[str] = set()
        self._tried_at = 0.0
        self._not_before: dict[str, float] = {}

    def __call__(self, runs: set[str]) -> None:
        """Write the records of these runs and, periodically, deferred ones."""
        now = self._clock()
        if self._owed and now - self._tried_at >= AGAIN:
            self._tried_at, runs, self._owed = now, runs | self._owed, set()
        early = {name for name in runs if now < self._not_before.get(name, 0.0)}
        self._owed |= early
        write_records(self._store, runs - early, self._write)

    def write_owed(self) -> None:
        """Write all deferred records regardless of the rate limit, except to hanging directories."""
        owed, self._owed = self._owed, set()
        write_records(self._store, owed, self._write)

    def _write(self, folder: RunDir, record: RunRecord) -> None:
        name = record.run.name
        try:
            size = self._files.call(folder.path, lambda: write_record(folder, record))
        except RunDirHangs:
            self._owed.add(name)
        else:
            self._not_before[name] = self._clock() + size / RATE - 1.0
