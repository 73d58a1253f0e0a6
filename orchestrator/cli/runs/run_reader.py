"""Reading a live run's directory again and again: JSON files that are being replaced, and files that grow."""

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import read_json
from trainer.contract.events import Event, read_events
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.logs.line_file import read_new_lines
from trainer.contract.run_dir import AttemptDir, RunDir

TAIL = 64 * 1024
"""Bytes at the end of a file in which its newest lines are."""
RECENT_STEPS = 100
"""Steps over which speed and trend of a run are looked at."""
_RANK_ZERO = "rank-00000"
_MAIN_FILES = ("coordinator.jsonl", "rank-00000.jsonl")
"""Event files in which most is told: opened at every poll, since on NFS only an open asks the server for the size."""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty for one that is being replaced, was never written, or holds something else."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest_heartbeat(attempt: AttemptDir) -> Heartbeat | None:
    """The coordinator's newest word; None where there is none that can be read."""
    try:
        return Heartbeat.read(attempt.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def file_size(path: Path) -> int:
    """Its bytes; 0 while there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_offset(path: Path) -> int:
    """Where to begin for the newest lines alone; the first of them may be torn."""
    return max(0, file_size(path) - TAIL)


class OpenAttempts:
    """Attempts that may still tell something: one that a later one follows is read once more, then left alone."""

    def __init__(self, place: RunDir, *, newest: bool = False) -> None:
        """`newest`: all but the newest attempt are left alone from the beginning."""
        self._place = place
        attempts = place.all_attempts() if newest else []
        self._oldest = self._begun = attempts[-1].number if attempts else 0

    def attempts(self) -> list[AttemptDir]:
        """Those to be read now, oldest first."""
        found = [attempt for attempt in self._place.all_attempts() if attempt.number >= self._oldest]
        self._oldest = self._begun
        return found

    def mark_written(self, attempt: AttemptDir) -> None:
        """This one has written something: those before it are over."""
        self._begun = max(self._begun, attempt.number)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Where training stands; loss is as it was written (nan and inf as words)."""

    attempt: int
    generation: int
    step: int
    loss: float | str | None
    tokens_per_s: float | None
    time: float
    seconds: float | None = None  # of the step itself
    mfu: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """Where the step's time went on rank 0, as shares of it: its own work by section, and `waiting`."""


class EventFeed:
    """Reads on where it stopped: every event once, and the newest metric."""

    def __init__(self, run_dir: Path, *, recent_only: bool = False) -> None:
        """`recent_only`: only the newest attempt, of it only rank 0, and only the ends of long files."""
        self._place, self._recent_only = RunDir(run_dir), recent_only
        self._open_attempts = OpenAttempts(self._place, newest=recent_only)
        self._events: dict[Path, int] = {}
        self._rank_zero: set[Path] = set()  # files in which it has written something
        self._metrics: dict[Path, int] = {}
        self.recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        """The newest steps, in the order they were trained."""

    @property
    def latest(self) -> StepMetrics | None:
        """The newest step."""
        return self.recent[-1] if self.recent else None

    def skip_existing(self) -> None:
        """What is there by now is never told; `latest` is brought up to date."""
        self._open_attempts = OpenAttempts(self._place, newest=True)
        for attempt in self._open_attempts.attempts():
            for path in self._files(attempt):
                self._events[path] = file_size(path)
            self._read_metrics(attempt)

    def poll(self) -> list[Event]:
        """Events that are new since the last call, by their time; `latest` is brought up to date."""
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
                found += self._wanted(events)
                if any(event.source == _RANK_ZERO for event in events):
                    self._rank_zero.add(path)
        return found

    def _wanted(self, events: list[Event]) -> list[Event]:
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
    """One line of steps.jsonl; None for a torn one."""
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
    """Where the time of a step went, from its line in steps.jsonl; empty for one of an older orch."""
    if "work" not in fields or not fields["seconds"]:
        return {}
    parts = {**fields["work"], "waiting": fields["waiting"], "saving": fields.get("stall", 0.0)}
    return {name: value / fields["seconds"] for name, value in parts.items()}


class StepLines:
    """Lines of steps.jsonl in the order they were trained, each read once."""

    def __init__(self, place: RunDir, *, recent_only: bool = False) -> None:
        """`recent_only`: only the newest lines that are there by now, and all that come."""
        self._open_attempts = OpenAttempts(place, newest=recent_only)
        self._lines: list[dict[str, Any]] = []
        newest = place.all_attempts()[-1:] if recent_only else []
        self._offsets = {attempt.metrics: tail_offset(attempt.metrics) for attempt in newest}

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        for attempt in self._open_attempts.attempts():
            path = attempt.metrics
            lines, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
            if lines:
                self._open_attempts.mark_written(attempt)
            self._lines += [fields for line in lines if (fields := _fields_of_line(line)) is not None]
        return self._lines


def _fields_of_line(line: bytes) -> dict[str, Any] | None:
    """None for what was torn by a kill in mid-write."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "step" in fields and "loss" in fields else None
