"""Repeated reading of a live run's directory: JSON files that are replaced, and files that grow."""

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import read_json
from trainer.protocol.events import Event, read_events
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.logs.line_file import read_new_lines
from trainer.protocol.run_dir import AttemptDir, RunDir

TAIL = 64 * 1024
"""Bytes read at the end of a file for its newest lines."""
RECENT_STEPS = 100
"""Number of newest steps for the speed and trend of a run."""
_RANK_ZERO = "rank-00000"
_MAIN_FILES = ("coordinator.jsonl", "rank-00000.jsonl")
"""Event files with most of the events; opened at every poll, since on NFS only an open updates the size."""


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing, unreadable or holds something else."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest_heartbeat(attempt: AttemptDir) -> Heartbeat | None:
    """Return the coordinator's newest heartbeat; None if none can be read."""
    try:
        return Heartbeat.read(attempt.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def file_size(path: Path) -> int:
    """Return the size in bytes; 0 while the file does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_offset(path: Path) -> int:
    """Return the offset at which to read only the newest lines; the first of them may be torn."""
    return max(0, file_size(path) - TAIL)


class OpenAttempts:
    """Attempts that may still write; an attempt with a successor is read once more, then skipped."""

    def __init__(self, place: RunDir, *, newest: bool = False) -> None:
        """`newest`: skip all but the newest attempt from the beginning."""
        self._place = place
        attempts = place.all_attempts() if newest else []
        self._oldest = self._begun = attempts[-1].number if attempts else 0

    def attempts(self) -> list[AttemptDir]:
        """Return the attempts to read now, oldest first."""
        found = [attempt for attempt in self._place.all_attempts() if attempt.number >= self._oldest]
        self._oldest = self._begun
        return found

    def mark_written(self, attempt: AttemptDir) -> None:
        """Record that this attempt has written, so that earlier ones are over."""
        self._begun = max(self._begun, attempt.number)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of a step. `loss` is as written (nan and inf as words)."""

    attempt: int
    generation: int
    step: int
    loss: float | str | None
    tokens_per_s: float | None
    time: float
    seconds: float | None = None  # of the step itself
    mfu: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the step's time on rank 0: its own work by section, and `waiting`."""


class EventFeed:
    """Incremental reader of a run: every event once, and the newest metrics."""

    def __init__(self, run_dir: Path, *, recent_only: bool = False) -> None:
        """`recent_only`: read only the newest attempt, of its ranks only rank 0, and only the ends of long files."""
        self._place, self._recent_only = RunDir(run_dir), recent_only
        self._open_attempts = OpenAttempts(self._place, newest=recent_only)
        self._events: dict[Path, int] = {}
        self._rank_zero: set[Path] = set()  # files in which rank 0 has written
        self._metrics: dict[Path, int] = {}
        self.recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        """The newest steps, in training order."""

    @property
    def latest(self) -> StepMetrics | None:
        """The newest step."""
        return self.recent[-1] if self.recent else None

    def skip_existing(self) -> None:
        """Skip the existing events, and update `latest`."""
        self._open_attempts = OpenAttempts(self._place, newest=True)
        for attempt in self._open_attempts.attempts():
            for path in self._files(attempt):
                self._events[path] = file_size(path)
            self._read_metrics(attempt)

    def poll(self) -> list[Event]:
        """Return the new events since the last call, sorted by time, and update `latest`."""
        fresh: list[Event] = []
        for attempt in self._open_attempts.attempts():
            found = self._fresh_events(attempt)
            if found:
                self._open_attempts.mark_written(attempt)
            fresh += found
            self._read_metrics(attempt)
        return sorted(fresh, key=lambda event: (event.time, event.attempt, event.seq))

    def _files(self, attempt: AttemptDir) -> list[Path]:
        names = sorted(os.listdir(attempt.events)) if attempt.events.is_dir() else []
        wanted = (name for name in names if not (self._recent_only and name.startswith("rank-")) or name in _MAIN_FILES)
        return [attempt.events / name for name in wanted]

    def _fresh_events(self, attempt: AttemptDir) -> list[Event]:
        found: list[Event] = []
        for path in self._files(attempt):
            if path not in self._events:
                self._events[path] = tail_offset(path) if self._recent_only else 0
            if path.name in _MAIN_FILES or path in self._rank_zero or file_size(path) > self._events[path]:
                events, self._events[path] = read_events(path, self._events[path])
                found += self._filter_events(events)
                if any(event.source == _RANK_ZERO for event in events):
                    self._rank_zero.add(path)
        return found

    def _filter_events(self, events: list[Event]) -> list[Event]:
        if not self._recent_only:
            return events
        return [event for event in events if event.source == _RANK_ZERO or not event.source.startswith("rank-")]

    def _read_metrics(self, attempt: AttemptDir) -> None:
        path = attempt.metrics
        if path not in self._metrics:
            self._metrics[path] = tail_offset(path)  # only the newest lines count
        lines, self._metrics[path] = read_new_lines(path, self._metrics[path])
        found = (_metrics_of_line(line) for line in lines[-RECENT_STEPS:])
        self.recent.extend(one for one in found if one is not None)


def _metrics_of_line(line: bytes) -> StepMetrics | None:
    """Parse a line of steps.jsonl; None for a torn one."""
    try:
        fields = json.loads(line)
        return StepMetrics(
            attempt=fields["attempt"], generation=fields["generation"], step=fields["step"], loss=fields.get("loss"),
            tokens_per_s=fields.get("tokens_per_s"), time=fields["time"], seconds=fields.get("seconds"),
            mfu=fields.get("mfu"), shares=shares_of_step(fields),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def shares_of_step(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of a step's time from its line in steps.jsonl; empty for a line of an older orch."""
    if "work" not in fields or not fields["seconds"]:
        return {}
    parts = {**fields["work"], "waiting": fields["waiting"], "saving": fields.get("stall", 0.0)}
    return {name: value / fields["seconds"] for name, value in parts.items()}


class StepLines:
    """Lines of steps.jsonl in training order, each read once."""

    def __init__(self, place: RunDir, *, recent_only: bool = False) -> None:
        """`recent_only`: only the newest existing lines, and all later ones."""
        self._open_attempts = OpenAttempts(place, newest=recent_only)
        self._lines: list[dict[str, Any]] = []
        newest = place.all_attempts()[-1:] if recent_only else []
        self._offsets = {attempt.metrics: tail_offset(attempt.metrics) for attempt in newest}

    def read(self) -> list[dict[str, Any]]:
        """Return all lines so far."""
        for attempt in self._open_attempts.attempts():
            path = attempt.metrics
            lines, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
            if lines:
                self._open_attempts.mark_written(attempt)
            self._lines += [fields for line in lines if (fields := _fields_of_line(line)) is not None]
        return self._lines


def _fields_of_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of steps.jsonl; None for a torn one."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "step" in fields and "loss" in fields else None
