"""What a rank records while it trains: metrics, the work log and its events."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.contract.events import EventKind, EventLog
from trainer.contract.failures.save_trouble import SaveTrouble
from trainer.contract.logs.line_file import LineFile
from trainer.contract.ranks.rank_messages import RankSpec
from trainer.contract.run_dir import AttemptDir
from trainer.worker.reporting.lines_behind import LinesBehind
from trainer.worker.reporting.stderr_best_effort import write_stderr


def _report_steps(why: str) -> None:
    write_stderr(f"orch: lines of steps.jsonl are lost: {why}")


class BestEffortLines:
    """JSON lines whose loss is reported on stderr and ends nothing: a full disk must not kill a rank that computes."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, LineFile(path)

    def write(self, fields: dict[str, Any]) -> None:
        try:
            self._file.append(dump_line(fields))
        except OSError as error:
            write_stderr(f"orch: a line of {self._path.name} is lost: {error}")

    def close(self) -> None:
        self._file.close()


WORK_LOG = "ORCH_WORK_LOG"
"""Environment variable: every rank writes a line for every step, at once. For tests, and for whoever doubts a run: on
many ranks it is too much for a shared file system."""
SETTLE_SECONDS = 1.0
"""How long a save waits for the lines of the steps before it to be written."""


class Journal:
    """One rank's records in its attempt's folder; safe to call from the checkpointer's thread too."""

    def __init__(
        self, attempt: AttemptDir, spec: RankSpec, on_saves: Callable[[str, int], None] = lambda trouble, size: None
    ) -> None:
        """`on_saves` hears whenever saves fail, why and of how many bytes, or work again (an empty text)."""
        self._spec, self._on_saves, self._trouble = spec, on_saves, SaveTrouble()
        self._work = BestEffortLines(attempt.work_log(spec.node_name)) if os.environ.get(WORK_LOG) else None
        self._steps = LinesBehind(lambda: LineFile(attempt.metrics), _report_steps) if spec.rank == 0 else None
        self._settles = True
        self._validation = attempt.validation
        self._final = attempt.final
        self._events = EventLog(attempt.rank_events(spec.node_name), f"rank-{spec.rank:05d}", spec.attempt)
        self._events.generation = spec.generation
        self._stalls: dict[int, float] = {}
        self._stalls_lock = threading.Lock()  # training adds to them while the saver's thread removes

    def _stamp(self) -> dict[str, Any]:
        return {"time": time.time(), "attempt": self._spec.attempt, "generation": self._spec.generation}

    def event(self, kind: EventKind, /, **data: Any) -> None:
        """Write an event; like every line here, it is lost when the disk is full."""
        try:
            self._events.write(kind, **data)
        except OSError as error:
            write_stderr(f"orch: event {kind} {data} is lost: {error}")

    def checkpoint(self, kind: str, data: dict[str, Any]) -> None:
        """Write an event of the checkpointer, which repeats it when this raises OSError."""
        if self._trouble.note(kind, data):  # first: the disk that took no checkpoint may take no event
            self._on_saves(self._trouble.text, self._trouble.size)
        if kind == EventKind.CHECKPOINT_COMMITTED:
            with self._stalls_lock:
                data = {**data, "stall": self._stalls.get(data["step"], 0.0)}
                self._stalls = {step: seconds for step, seconds in self._stalls.items() if step > data["step"]}
        self._events.write(EventKind(kind), **data)

    def stalled(self, step: int, seconds: float) -> None:
        """Training waited `seconds` for the save of `step`; the event of its commit has the sum."""
        with self._stalls_lock:
            self._stalls[step] = self._stalls.get(step, 0.0) + seconds

    def save_interval(self, steps: int, seconds: float, reason: str) -> None:
        """Saves are `steps` apart from now on."""
        self.event(EventKind.CHECKPOINT_CADENCE, steps=steps, seconds=seconds, reason=reason)

    def worked(self, step: int) -> None:
        """This rank has trained `step`: where WORK_LOG is set, a line shows that no step was trained twice at once."""
        spec = self._spec
        if self._work is not None:
            told = {"rank": spec.rank, "node": spec.node_name, "pid": os.getpid(), "step": step}
            self._work.write({**self._stamp(), **told})

    def step(self, step: int, **values: Any) -> None:
        """One metric line; only rank 0 writes them."""
        if self._steps is not None:
            self._steps.append(dump_line({**self._stamp(), "step": step, **values}))

    def settle(self) -> None:
        """Have the lines of all steps so far written: a restart from the save that follows repeats none of them.

        Waits for SETTLE_SECONDS at most, and no more once the file has not answered in time.
        """
        if self._steps is not None:
            self._settles = self._steps.flush(SETTLE_SECONDS if self._settles else 0.0)

    def validated(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """One line and one event; only rank 0 writes them."""
        if self._spec.rank != 0:
            return
        found = {"step": step, "seconds": seconds, "metrics": dict(metrics)}
        lines = BestEffortLines(self._validation)  # there is a file only where somebody validates
        lines.write({**self._stamp(), **found})
        lines.close()
        self.event(EventKind.VALIDATED, **found)

    def final(self, **values: Any) -> None:
        """`metrics/final.json`: what the finished run ended with."""
        write_durably(self._final, dump_line({"schema": "orch.final/1", **self._stamp(), **values}).encode())

    def close(self) -> None:
        self._events.close()
        if self._work is not None:
            self._work.close()
        if self._steps is not None:
            self._steps.close()
