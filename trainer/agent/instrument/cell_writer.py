"""Writer of a progress cell in a user's program.

The layout is `ProgressCell`'s (trainer/protocol/rank_progress/progress.py), and in its free area `ProgramRecord`'s
(program_record.py there). A test compares both sides byte for byte. Standard library, Python 3.9.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Callable

SIZE = 4096
PHASES = {
    "init": 0, "compile": 1, "restore": 2, "data": 3, "forward": 4, "backward": 5, "optimizer": 6, "checkpoint": 7,
    "eval": 8, "evaluation": 8, "done": 9,
}  # fmt: skip
DATA, FORWARD, BACKWARD, OPTIMIZER, EVAL = 3, 4, 5, 6, 8
INSTRUMENTED, DISABLED, ANSWERS, KNOWS_LOSS = 1, 2, 4, 16
"""Flags of the program record."""

TIMED_STEPS = 8
"""Steps of which one is timed. Its own work stands for all of them."""
_LONG = 100_000_000
"""Nanoseconds of a phase that is timed in any step."""

_STEP, _PHASE, _COLLECTIVE, _STEP_AT, _PHASE_AT, _MOVED_AT = 1, 2, 3, 5, 6, 7
_WHOLE = {"step": _STEP, "saved_step": 10, "total_steps": 11, "restored_step": 12}
_STEP_SECONDS = 14
_REAL = {"loss": 8, "grad_norm": 9, "save_seconds": 13, "step_seconds": _STEP_SECONDS}
"""Positions of fields, in words of 8 bytes. The word of the phase holds the generation in its upper half."""
_STOP, _STOP_AT = struct.Struct("<IId"), 256
_TICK, _WORK, _TIMES, _ROW = 336 // 8, 384 // 8, 512 // 4, 160 // 4
_BUCKETS, _SHORTEST, _SCALE = 40, 0.001, 1.0 / math.log(math.sqrt(2.0))
_RECORD_AT, _NAMES_AT, _NAMES_SIZE, _ERROR_AT, _ERROR_SIZE = 3072, 3088, 240, 3328, 512
_PID, _FLAGS, _RANK, _UNUSABLE = (_RECORD_AT // 4 + word for word in range(4))
_SINCE, _FINITE_UNTIL = 3840 // 8, 3848 // 8
"""Step of the first of the unusable losses in a row, and the time of the last finite one."""


def bucket(seconds: float) -> int:
    """Return a duration's bucket, as `ProgressCell` counts it."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) * _SCALE - 1e-9))


class CellWriter:
    """Cell of one rank. A process that another one has replaced as the writer changes nothing any more.

    There is no lock, because a signal handler may interrupt a write and raise. Two threads that write at once mix
    their fields in one reading, and the next write repairs a sequence number that an error has left odd.
    """

    def __init__(self, path: str) -> None:
        """Open the cell by path, because launchers close inherited descriptors. Raises OSError and ValueError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        view = memoryview(self._map)
        self._words, self._floats = view.cast("q"), view.cast("d")
        self._counts, self._ranks = view.cast("I"), view.cast("i")
        self.warm, self.timed, self.phase, self._generation = False, False, 0, 0
        self._pid = self._flags = 0
        self._frameworks: list[str] = []
        self._sequence = self._words[0] + self._words[0] % 2
        self._phase_at = self._wall_at = self._cpu_at = 0
        self._started: int | None = None
        self.count_collectives: Callable[[], int | None] = lambda: None
        """Number of collectives that this process has started; None: unknown."""

    # -- the program record

    def owner(self) -> int:
        """Return the writer's process; 0: none."""
        return self._counts[_PID]

    def is_owner(self) -> bool:
        return self._counts[_PID] == self._pid

    def claim(self, pid: int, rank: int, generation: int) -> None:
        """Become the cell's writer. The rank -1 is unknown."""
        self._pid, self._generation, self._flags = pid, generation << 32, INSTRUMENTED
        self._counts[_PID] = 0
        self._map[_NAMES_AT : _ERROR_AT + _ERROR_SIZE] = bytes(_NAMES_SIZE + _ERROR_SIZE)
        self._counts[_UNUSABLE], self._words[_SINCE], self._floats[_FINITE_UNTIL] = 0, 0, 0.0
        self._counts[_FLAGS], self._ranks[_RANK] = self._flags, rank
        self._counts[_PID] = pid
        self.enter(PHASES["init"])

    def set_rank(self, rank: int) -> None:
        if self.is_owner():
            self._ranks[_RANK] = rank

    def rank(self) -> int:
        """Return the rank in its world; -1: unknown."""
        return self._ranks[_RANK]

    def add_flags(self, flags: int) -> None:
        self._flags |= flags
        if self.is_owner():
            self._counts[_FLAGS] = self._flags

    @property
    def frameworks(self) -> str:
        """Return the names of the frameworks found, separated by commas."""
        return ",".join(self._frameworks)

    def add_framework(self, name: str) -> None:
        if name not in self._frameworks and self.is_owner():
            self._frameworks.append(name)
            self._write_text(_NAMES_AT, _NAMES_SIZE, self.frameworks)

    def disable(self, text: str) -> None:
        """Record an error after which this writer writes nothing more."""
        if self.is_owner():
            self._write_text(_ERROR_AT, _ERROR_SIZE, text)
            self.add_flags(DISABLED)

    def _write_text(self, at: int, size: int, text: str) -> None:
        cut = text.encode(errors="replace")[: size - 1].decode(errors="ignore").encode()
        self._map[at : at + size] = cut.ljust(size, b"\0")

    # -- the progress

    def enter(self, phase: int, changes: dict[str, float] | None = None) -> None:
        """Enter a phase. Record the duration of the one before if it was long, and in every eighth step."""
        words = self._words
        if self._counts[_PID] != self._pid:
            return
        at = time.monotonic_ns()
        ends = phase != self.phase or (changes is not None and "step" in changes)
        if ends and (self.timed or at - self._phase_at > _LONG):
            self._record_duration(at)
        self.phase, self._phase_at = phase, at
        words[0] = self._sequence + 1
        words[_PHASE], words[_PHASE_AT], words[_MOVED_AT] = phase | self._generation, at, at
        if changes:
            self._set(changes, at)
        words[0] = self._sequence = self._sequence + 2

    def record_step(self, number: int, before: int) -> int:
        """Record a step that an optimizer has finished, and the seconds since the one at `before`. Return the time."""
        words, at = self._words, time.monotonic_ns()
        if self.timed or at - self._phase_at > _LONG:
            self._record_duration(at)
        self.phase, self._phase_at = FORWARD, at
        words[0] = self._sequence + 1
        words[_STEP] = number
        if self.timed:
            words[_WORK] = number
        words[_STEP_AT] = words[_PHASE_AT] = words[_MOVED_AT] = at
        words[_PHASE] = FORWARD | self._generation
        self._floats[_STEP_SECONDS] = (at - before) * 1e-9
        words[0] = self._sequence = self._sequence + 2
        return at

    def begin_timing(self, step: int) -> None:
        """Start the times of the step after `step`. The clock of the CPU costs microseconds, so most have none."""
        self.warm, self.timed = True, step % TIMED_STEPS == 0
        if self.timed:
            self._wall_at, self._cpu_at = time.monotonic_ns(), time.thread_time_ns()
            self._started = self.count_collectives()

    def _record_duration(self, at: int) -> None:
        """Count the duration of a phase, and add the rank's own work in it (data, forward, backward, optimizer).

        In a phase without collectives, the rank has waited for no peer, so all of its time is its own. Otherwise only
        its CPU time is. The count of steps with own work moves with it, so that a reader never sees half of a step.
        """
        if self.warm:
            self._counts[_TIMES + _ROW * self.phase + bucket((at - self._phase_at) * 1e-9)] += 1
        if self.timed:
            cpu, started = time.thread_time_ns(), self.count_collectives()
            if started is not None:
                self._words[_COLLECTIVE] = started
            is_alone = started is not None and started == self._started
            own = at - self._wall_at if is_alone else cpu - self._cpu_at
            if DATA <= self.phase <= OPTIMIZER:
                self._words[_WORK + 1 + self.phase - DATA] += TIMED_STEPS * max(0, own)
            self._wall_at, self._cpu_at, self._started = at, cpu, started

    def update(self, **changes: float) -> None:
        """Change fields of the reading, and record movement."""
        if self._counts[_PID] == self._pid:
            at, words = time.monotonic_ns(), self._words
            words[0] = self._sequence + 1
            words[_MOVED_AT] = at
            self._set(changes, at)
            words[0] = self._sequence = self._sequence + 2

    def _set(self, changes: dict[str, float], at: int) -> None:
        words = self._words
        for name, value in changes.items():
            if name in _WHOLE:
                words[_WHOLE[name]] = int(value)
            else:
                self._floats[_REAL[name]] = value
        if "loss" in changes:
            self._note_loss(changes["loss"], int(changes.get("step", words[_STEP])))
        if "step" in changes:
            words[_STEP_AT] = at
            if self.timed:
                words[_WORK] = words[_STEP]

    def _note_loss(self, loss: float, step: int) -> None:
        """Count the losses in a row that are NaN or infinite."""
        if not self._flags & KNOWS_LOSS:
            self.add_flags(KNOWS_LOSS)
        if math.isfinite(loss):
            self._floats[_FINITE_UNTIL], self._counts[_UNUSABLE] = time.time(), 0
            return
        if not self._counts[_UNUSABLE]:
            self._words[_SINCE] = step
        self._counts[_UNUSABLE] += 1

    def read_step(self) -> int:
        return self._words[_STEP]

    def read_saved_step(self) -> int:
        return self._words[_WHOLE["saved_step"]]

    def tick(self, collective: int = 0) -> None:
        """Record that Python's lock is available, and the number of collectives started so far (0: unknown).

        A program that has ended its process groups has no count any more.
        """
        if self.is_owner():
            self._words[_COLLECTIVE] = collective or self._words[_COLLECTIVE]
            self._words[_TICK] = time.monotonic_ns()

    def read_stop_request(self) -> tuple[int, float]:
        """Return the agent's request: its reason (0: none) and deadline on CLOCK_MONOTONIC (0: none)."""
        reason, _, deadline = _STOP.unpack_from(self._map, _STOP_AT)
        return reason, deadline
