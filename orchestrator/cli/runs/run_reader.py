"""Read a live run's directory repeatedly: JSON files that jobs replace, and files that grow."""

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import file_size
from trainer.protocol.events import Event, read_events
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.logs.line_file import read_new_lines
from trainer.protocol.rank_readings import RankReadings
from trainer.protocol.run_dir import AttemptDir, RunDir

TAIL = 64 * 1024
"""Number of bytes read from the end of a file to get its newest lines."""
RECENT_STEPS = 100
"""Number of newest steps used to compute a run's speed and trend."""
StepLine = dict[str, Any]
"""A line of steps.jsonl, with the loss as written (nan and inf as words)."""
PROCESS_STATES = {"T": "stopped", "t": "held by a debugger", "D": "waiting for a device", "Z": "dead", "X": "gone"}
"""Process states that keep a rank from working, keyed by their letter in /proc."""
_RANK_ZERO = "rank-00000"
_MAIN_FILES = ("coordinator.jsonl", "rank-00000.jsonl")
"""Files that hold most of the events. Each poll opens them, because on NFS only opening a file updates its size."""


def newest_heartbeat(attempt: AttemptDir) -> Heartbeat | None:
    """Return the coordinator's newest heartbeat; None if it cannot be read."""
    try:
        return Heartbeat.read(attempt.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def newest_ranks(attempt: AttemptDir) -> RankReadings | None:
    """Return the coordinator's newest readings of its ranks; None if they cannot be read."""
    try:
        return RankReadings.read(attempt.ranks)
    except (OSError, ValueError):
        return None


def parse_steps(lines: Iterable[bytes]) -> Iterator[StepLine]:
    """Yield the steps in lines of steps.jsonl, skipping lines torn by a kill or cut off at the start of a read."""
    for line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and "step" in fields:
            yield fields


class OpenAttempts:
    """Attempts that may still write. An attempt with a successor is read once more, then skipped."""

    def __init__(self, place: RunDir, *, newest: bool = False) -> None:
        """`newest`: ignore all attempts that precede the newest one."""
        self._place = place
        attempts = place.all_attempts() if newest else []
        self._oldest = self._begun = attempts[-1].number if attempts else 0

    def attempts(self) -> list[AttemptDir]:
        """Return the attempts to read now, oldest first."""
        found = [attempt for attempt in self._place.all_attempts() if attempt.number >= self._oldest]
        self._oldest = self._begun
        return found

    def mark_written(self, attempt: AttemptDir) -> None:
        """Record that this attempt has written something, which means that earlier ones are over."""
        self._begun = max(self._begun, attempt.number)


class StepLines:
    """Lines of steps.jsonl in training order, each read once."""

    def __init__(self, place: RunDir, *, recent_only: bool = False, keep: int | None = None) -> None:
        """`recent_only`: read only the newest existing lines, and all later ones. `keep`: number of lines to keep."""
        self._open_attempts = OpenAttempts(place, newest=recent_only)
        self._lines: deque[StepLine] = deque(maxlen=keep)
        newest = place.all_attempts()[-1:] if recent_only else []
        self._offsets = {attempt.metrics: max(0, file_size(attempt.metrics) - TAIL) for attempt in newest}

    def read(self) -> list[StepLine]:
        """Return all lines kept so far."""
        for attempt in self._open_attempts.attempts():
            path = attempt.metrics
            lines, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
            if lines:
                self._open_attempts.mark_written(attempt)
            self._lines.extend(parse_steps(lines))
        return list(self._lines)


class EventFeed:
    """Incremental reader of a run: every event once, and the newest steps."""

    def __init__(self, run_dir: Path, *, recent_only: bool = False) -> None:
        """`recent_only`: read only the newest attempt, only its rank 0, and only the ends of long files."""
        self._place, self._recent_only = RunDir(run_dir), recent_only
        self._open_attempts = OpenAttempts(self._place, newest=recent_only)
        self._events: dict[Path, int] = {}
        self._rank_zero: set[Path] = set()  # files to which rank 0 has written
        self._steps = StepLines(self._place, recent_only=True, keep=RECENT_STEPS)
        self.recent: list[StepLine] = []
        """The newest steps, in training order."""

    @property
    def latest(self) -> StepLine | None:
        """The newest step."""
        return self.recent[-1] if self.recent else None

    def skip_existing(self) -> None:
        """Skip the existing events, and update `recent`."""
        self._open_attempts = OpenAttempts(self._place, newest=True)
        files = (path for attempt in self._open_attempts.attempts() for path in self._files(attempt))
        self._events = {path: file_size(path) for path in files}
        self.recent = self._steps.read()

    def poll(self) -> list[Event]:
        """Return the new events since the last call, sorted by time, and update `recent`."""
        fresh: list[Event] = []
        for attempt in self._open_attempts.attempts():
            found = [event for path in self._files(attempt) for event in self._new_events(path)]
            if found:
                self._open_attempts.mark_written(attempt)
            fresh += found
        self.recent = self._steps.read()
        return sorted(fresh, key=lambda event: (event.time, event.attempt, event.seq))

    def _files(self, attempt: AttemptDir) -> list[Path]:
        names = sorted(os.listdir(attempt.events)) if attempt.events.is_dir() else []
        wanted = (name for name in names if not (self._recent_only and name.startswith("rank-")) or name in _MAIN_FILES)
        return [attempt.events / name for name in wanted]

    def _new_events(self, path: Path) -> list[Event]:
        start = self._events.setdefault(path, max(0, file_size(path) - TAIL) if self._recent_only else 0)
        if path.name not in _MAIN_FILES and path not in self._rank_zero and file_size(path) <= start:
            return []
        events, self._events[path] = read_events(path, start)
        if any(event.source == _RANK_ZERO for event in events):
            self._rank_zero.add(path)
        if not self._recent_only:
            return events
        return [event for event in events if event.source == _RANK_ZERO or not event.source.startswith("rank-")]
