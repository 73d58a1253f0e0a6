"""What a rank tells while it trains: metric lines, the work log, its progress cell and its events."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from checkpointing.durable import dump_line, write_durably
from trainer.contract.events import EventKind, EventLog
from trainer.contract.rank import RankSpec
from trainer.contract.run_dir import AttemptDir


class Lines:
    """Appends JSON lines; each is one write to an O_APPEND descriptor, so that many processes can share a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, fields: dict[str, Any]) -> None:
        os.write(self._descriptor, (dump_line(fields) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """One rank's records in its attempt's folder; safe to call from the checkpointer's thread too."""

    def __init__(self, attempt: AttemptDir, spec: RankSpec) -> None:
        self._spec = spec
        self._work = Lines(attempt.work_log)
        self._steps = Lines(attempt.metrics) if spec.rank == 0 else None
        self._final = attempt.final
        source = f"rank-{spec.rank:05d}"
        self._events = EventLog(attempt.event_file(source), source, spec.attempt)
        self._events.generation = spec.generation
        self._lock = threading.Lock()

    def _stamp(self) -> dict[str, Any]:
        return {"time": time.time(), "attempt": self._spec.attempt, "generation": self._spec.generation}

    def event(self, kind: EventKind, /, **data: Any) -> None:
        with self._lock:
            self._events.write(kind, **data)

    def worked(self, step: int) -> None:
        """This rank has trained `step`: the line by which anybody can check that no step was trained twice at once."""
        spec = self._spec
        self._work.write({**self._stamp(), "rank": spec.rank, "node": spec.node_name, "pid": os.getpid(), "step": step})

    def step(self, step: int, **values: float) -> None:
        """One metric line; only rank 0 writes them."""
        if self._steps is not None:
            self._steps.write({**self._stamp(), "step": step, **values})

    def final(self, **values: Any) -> None:
        """`metrics/final.json`: what the finished run ended with."""
        write_durably(self._final, dump_line({"schema": "orch.final/1", **self._stamp(), **values}).encode())

    def close(self) -> None:
        self._events.close()
        self._work.close()
        if self._steps is not None:
            self._steps.close()
