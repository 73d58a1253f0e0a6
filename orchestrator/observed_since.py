"""Measures how long values stay unchanged, by this host's clock; other hosts' clocks are never compared."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import dump_line, write_atomically

LOOK = 20.0
"""Maximum seconds between two observations that count in full; passes are at most 15 s apart."""


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
        self._seen: dict[str, tuple[str, float]] = {}
        self._lasted: dict[str, tuple[str, float, float]] = {}  # value, last observation, seconds so far
        self._load()

    def age(self, key: str, value: object) -> float:
        """Return the seconds since `key` was first seen with this value; 0.0 on the first call."""
        now, text = self._mono(), str(value)
        before = self._seen.get(key)
        if before is None or before[0] != text or before[1] > now:
            self._seen[key] = (text, now)
            return 0.0
        return now - before[1]

    def watched_seconds(self, key: str, value: object) -> float:
        """Return the seconds for which `key` was *watched* with this value, at most `LOOK` between two calls.

        Time in which this process itself stalled (a suspended machine, a frozen VM) is therefore not counted.
        """
        now, text = self._mono(), str(value)
        before = self._lasted.get(key)
        if before is None or before[0] != text or before[1] > now:
            self._lasted[key] = (text, now, 0.0)
            return 0.0
        total = before[2] + min(now - before[1], LOOK)
        self._lasted[key] = (text, now, total)
        return total

    def value(self, key: str) -> str:
        """Return the last value seen for `key`; empty if it was never seen."""
        return self._seen.get(key, ("", 0.0))[0]

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)
        self._lasted.pop(key, None)

    def save(self) -> None:
        """Save the observations for the next process."""
        if self._path is not None:
            write_atomically(
                self._path, dump_line({"boot": self._boot, "seen": self._seen, "lasted": self._lasted}).encode()
            )

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["boot"] == self._boot:
                self._seen = {key: (str(value), float(at)) for key, (value, at) in kept["seen"].items()}
                lasted = kept.get("lasted", {}).items()
                self._lasted = {key: (str(value), float(at), float(total)) for key, (value, at, total) in lasted}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._seen, self._lasted = {}, {}
