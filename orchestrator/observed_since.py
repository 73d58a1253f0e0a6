"""Measures how long values stay unchanged. Uses only this host's clock and never compares other hosts' clocks."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import dump_line, write_atomically

LOOK = 20.0
"""Longest gap in seconds between two observations that counts in full; passes are at most 15 s apart."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Clocks of the controller; `mono` never goes backwards and measures durations."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)


class ObservedSince:
    """Record of when each key was first seen with its current value.

    With a `path` the record survives the process, so that single passes from cron can measure durations too. After a
    reboot (another `boot`) it starts empty, because the monotonic clock starts again.
    """

    def __init__(self, mono: Callable[[], float], path: Path | None = None, boot: str = "") -> None:
        self._mono, self._path, self._boot = mono, path, boot
        self._seen: dict[str, tuple[str, float, float, float]] = {}  # value, first and last time, seconds watched
        self._load()

    def age(self, key: str, value: object) -> float:
        """Return the seconds since `key` was first seen with this value, or 0.0 on the first call."""
        _, first, last, _ = self._observe(key, str(value))
        return last - first

    def watched_seconds(self, key: str, value: object) -> float:
        """Return the seconds for which `key` was *watched* with this value, at most `LOOK` between two calls.

        Time in which this process itself stalled (a suspended machine, a frozen VM) is therefore not counted.
        """
        return self._observe(key, str(value))[3]

    def _observe(self, key: str, text: str) -> tuple[str, float, float, float]:
        now = self._mono()
        value, first, last, watched = self._seen.get(key, ("", now, now, 0.0))
        is_same = value == text and last <= now
        entry = (text, first, now, watched + min(now - last, LOOK)) if is_same else (text, now, now, 0.0)
        self._seen[key] = entry
        return entry

    def value(self, key: str) -> str:
        """Return the last value seen for `key`, or "" if it was never seen."""
        return self._seen[key][0] if key in self._seen else ""

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)

    def save(self) -> None:
        """Save the observations for the next process."""
        if self._path is not None:
            write_atomically(self._path, dump_line({"boot": self._boot, "seen": self._seen}).encode())

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["boot"] == self._boot:
                self._seen = {
                    key: (str(value), float(first), float(last), float(watched))
                    for key, (value, first, last, watched) in kept["seen"].items()
                }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._seen = {}
