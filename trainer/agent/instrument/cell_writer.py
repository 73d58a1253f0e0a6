"""Writer of a progress cell in a user's program.

The layout is `ProgressCell`'s (trainer/protocol/rank_progress/progress.py), and in its free area the program record
(program_record.py there). A test compares both sides byte for byte. Standard library, Python 3.9.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from typing import Any

SIZE = 4096
PHASES = {
    "init": 0, "compile": 1, "restore": 2, "data": 3, "forward": 4, "backward": 5, "optimizer": 6, "checkpoint": 7,
    "eval": 8, "evaluation": 8, "done": 9,
}  # fmt: skip
INSTRUMENTED, DISABLED, ANSWERS, JOINED = 1, 2, 4, 8
"""Flags of the program record. JOINED: its writer trains as a rank, so no other process may replace it."""

_BODY = struct.Struct("<qIIqqqqqddqqqddIii")
_STOP, _STOP_AT = struct.Struct("<IId"), 256
_TICK = 336 // 8
_TIMES_AT, _ROW_SIZE, _COUNT = 512, 160, struct.Struct("<I")
_BUCKETS, _SHORTEST, _SCALE = 40, 0.001, 1.0 / math.log(math.sqrt(2.0))
_RECORD, _RECORD_AT = struct.Struct("<IIi4x"), 3072
_PID = struct.Struct("<I")
_NAMES_AT, _NAMES_SIZE, _ERROR_AT, _ERROR_SIZE = 3088, 240, 3328, 512


def bucket(seconds: float) -> int:
    """Return a duration's bucket, as `ProgressCell` counts it."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) * _SCALE - 1e-9))


class CellWriter:
    """The cell of one rank. A process that another one has replaced as its writer changes nothing any more."""

    def __init__(self, path: str) -> None:
        """Open the cell by path, because launchers close inherited descriptors. Raises OSError and ValueError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")
        self.warm, self.saved_step, self.phase = False, 0, 0
        self._pid = self._flags = 0
        self._rank = -1
        self._frameworks: list[str] = []
        self._sequence = self._words[0] + self._words[0] % 2
        self._step = self._generation = self._step_at = self._phase_at = self._total = self._restored = 0
        self._loss = self._step_seconds = 0.0

    def owner(self) -> tuple[int, bool]:
        """Return the writer's process (0: none) and whether it trains as a rank."""
        pid, flags, _ = _RECORD.unpack_from(self._map, _RECORD_AT)
        return pid, bool(flags & JOINED)

    def claim(self, pid: int, rank: int) -> None:
        """Become the cell's writer, or change its rank. -1: unknown."""
        self._flags |= INSTRUMENTED | (JOINED if self._pid == pid else 0)
        self._pid, self._rank = pid, rank if rank >= 0 else self._rank
        self._write_record()

    def add_flags(self, flags: int) -> None:
        self._flags |= flags
        self._write_record()

    def add_framework(self, name: str) -> None:
        if name not in self._frameworks:
            self._frameworks.append(name)
            self._write_text(_NAMES_AT, _NAMES_SIZE, ",".join(self._frameworks))

    def disable(self, text: str) -> None:
        """Record an error after which this writer writes nothing more."""
        self._write_text(_ERROR_AT, _ERROR_SIZE, text)
        self.add_flags(DISABLED)

    def _write_record(self) -> None:
        _RECORD.pack_into(self._map, _RECORD_AT, self._pid, self._flags, self._rank)

    def _write_text(self, at: int, size: int, text: str) -> None:
        self._map[at : at + size] = text.encode(errors="replace")[: size - 1].ljust(size, b"\0")

    def update(self, **changes: float) -> None:
        """Change fields of the reading; `step` and `phase` also set their times."""
        at = time.monotonic_ns()
        self._set(changes, at)
        if "phase" in changes:
            self.phase, self._phase_at = int(changes["phase"]), at
        self._publish(at)

    def enter(self, phase: int, changes: dict[str, float] | None = None) -> None:
        """Enter a phase, and record the duration of the one before once `warm`."""
        at = time.monotonic_ns()
        if self.warm and phase != self.phase:
            place = _TIMES_AT + _ROW_SIZE * self.phase + _COUNT.size * bucket((at - self._phase_at) * 1e-9)
            _COUNT.pack_into(self._map, place, _COUNT.unpack_from(self._map, place)[0] + 1)
        if changes:
            self._set(changes, at)
        self.phase, self._phase_at = phase, at
        self._publish(at)

    def touch(self) -> None:
        """Record movement."""
        self._publish(time.monotonic_ns())

    def _set(self, changes: dict[str, Any], at: int) -> None:
        if "step" in changes:
            self._step, self._step_at = changes["step"], at
        self._generation = changes.get("generation", self._generation)
        self._loss = changes.get("loss", self._loss)
        self._step_seconds = changes.get("step_seconds", self._step_seconds)
        self._total = changes.get("total_steps", self._total)
        self._restored = changes.get("restored_step", self._restored)
        self.saved_step = changes.get("saved_step", self.saved_step)

    def _publish(self, at: int) -> None:
        if _PID.unpack_from(self._map, _RECORD_AT)[0] != self._pid:
            return
        sequence = self._sequence
        self._words[0] = sequence + 1
        _BODY.pack_into(
            self._map, 8, self._step, self.phase, self._generation, 0, 0, self._step_at, self._phase_at, at,
            self._loss, 0.0, self.saved_step, self._total, self._restored, 0.0, self._step_seconds, 0, 0, 0,
        )  # fmt: skip
        self._words[0] = sequence + 2
        self._sequence = sequence + 2

    def tick(self) -> None:
        """Record that Python's lock is available."""
        if _PID.unpack_from(self._map, _RECORD_AT)[0] == self._pid:
            self._words[_TICK] = time.monotonic_ns()

    def read_stop_request(self) -> tuple[int, float]:
        """Return the agent's request: its reason (0: none) and deadline on CLOCK_MONOTONIC (0: none)."""
        reason, _, deadline = _STOP.unpack_from(self._map, _STOP_AT)
        return reason, deadline

    def close(self) -> None:
        self._words.release()
        self._map.close()
