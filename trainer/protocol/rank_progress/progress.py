"""The progress cell that a rank writes and its agent reads, and the signals that ranks ignore.

Only agents act on these signals. Programs that a rank starts would inherit an ignored or blocked signal, so ranks
install handlers that do nothing. `exec` resets such handlers, and hooks reset them in forks.
"""

import math
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from functools import cache
from types import FrameType
from typing import NamedTuple

from trainer.protocol.rank_progress.program_record import ProgramRecord, unpack_program

BUCKETS = 40
_SHORTEST = 0.001
_GROWTH = math.sqrt(2.0)
_SCALE = 1.0 / math.log(_GROWTH)


def bucket(seconds: float) -> int:
    """Return a duration's bucket. The first ends at 1 ms, and every end is 1.41 times the previous one, up to 740 s."""
    if seconds <= _SHORTEST:
        return 0
    return min(BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) * _SCALE - 1e-9))


def longest(index: int) -> float:
    """Return the end of a bucket in seconds. The last bucket has no end, but gets a value anyway."""
    return _SHORTEST * _GROWTH**index


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the quantile in seconds, at most 1.41 times too large, or 0 if there are no durations."""
    total = sum(counts)
    if not total:
        return 0.0
    wanted, seen = math.ceil(share * total), 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return longest(index)
    raise AssertionError("counts that do not add up to their sum")


def sum_counts(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the summed counts of several ranks."""
    return tuple(map(sum, zip(*rows, strict=True)))


class Activity(StrEnum):
    """Activities of a rank, one at a time. A progress cell stores the index in this order, starting at 1."""

    WAIT_FOR_ACTIVATION = "waits for the activation of"
    WAIT_FOR_GRADIENT = "waits for the gradient of"
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "gradients of activations"
    WEIGHT_GRADIENT = "gradients of weights"
    SEND_ACTIVATION = "sends the activation of"
    SEND_GRADIENT = "sends the gradient of"
    WAIT_FOR_SENT_ACTIVATION = "waits for a stage to take the activation of"
    WAIT_FOR_SENT_GRADIENT = "waits for a stage to take the gradient of"
    REDUCE = "reduces gradients"  # over data-parallel ranks, once per step
    WAIT_IN_RING = "waits for keys and values of"


_ACTIVITIES = tuple(Activity)
CODES = {activity: code for code, activity in enumerate(_ACTIVITIES, 1)}
_PASSES = (Activity.FORWARD, Activity.BACKWARD)
"""Activities that share their names with phases."""
RECEIVES = (Activity.WAIT_FOR_ACTIVATION, Activity.WAIT_FOR_GRADIENT)
AWAITED_SENDS = (Activity.WAIT_FOR_SENT_ACTIVATION, Activity.WAIT_FOR_SENT_GRADIENT)
OF_ACTIVATIONS = (Activity.WAIT_FOR_ACTIVATION, Activity.SEND_ACTIVATION, Activity.WAIT_FOR_SENT_ACTIVATION)
"""Activities that involve activations, which go to the next stage. Gradients go to the previous stage."""


class StageActivity(NamedTuple):
    """Activity of a stage with a micro-batch; -1 stands for the reduction, which covers all micro-batches.

    While it waits in a ring, `stage` is the global rank that this rank is waiting for.
    """

    activity: Activity
    stage: int
    micro_batch: int

    @property
    def code(self) -> int:
        """Return the activity's number, starting at 1."""
        return CODES[self.activity]

    def __str__(self) -> str:
        stage = f"stage {self.stage}"
        if self.activity is Activity.WAIT_IN_RING:
            return f"{self.activity} rank {self.stage}"
        if self.activity is Activity.REDUCE:
            return f"{self.activity}, {stage}"
        if self.activity in _PASSES:
            return f"micro-batch {self.micro_batch}, {stage}"
        joint = " " if self.activity.endswith("of") else ", "
        return f"{self.activity}{joint}micro-batch {self.micro_batch}, {stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessages:
    """Counts of the micro-batches that a pipeline rank has sent, for each of its stages."""

    after_step: int  # last step finished before these passes
    activations: tuple[int, ...]
    gradients: tuple[int, ...]

    def to_row(self) -> tuple[int, ...]:
        """Return the counts as numbers for the wire."""
        return (self.after_step, *self.activations, *self.gradients)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> "SentMessages | None":
        """Parse a row, or return None if it is invalid."""
        if len(row) < 3 or not len(row) % 2:
            return None
        half = len(row) // 2
        return cls(after_step=row[0], activations=tuple(row[1 : half + 1]), gradients=tuple(row[half + 1 :]))


def decode_activity(code: int, stage: int, micro_batch: int) -> StageActivity | None:
    """Return the activity for these numbers, or None for 0 (no activity) and for unknown codes."""
    return StageActivity(_ACTIVITIES[code - 1], stage, micro_batch) if 0 < code <= len(_ACTIVITIES) else None


STEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals before a time limit (orch requests USR2, other tools USR1), at a step's end, and from `scancel -s INT`."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def block_step_signals() -> Iterator[None]:
    """Block the signals while a child is being started. The child inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_step_signals() -> None:
    """Undo `block_step_signals` in the child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)


def outlive_step_signals() -> None:
    """Ignore these signals from now on, only in this process. Its children get the default handlers."""
    _reset_in_children()
    for number in STEP_SIGNALS:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)  # for libraries that do not handle EINTR
    unblock_step_signals()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle the signal by doing nothing."""


@cache
def _reset_in_children() -> None:
    """Make every fork start with the default handlers. Signals are blocked during the fork."""
    own = threading.local()

    def hold() -> None:
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def reset() -> None:
        for number in STEP_SIGNALS:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=reset)


SIZE = 4096
_SENT_AT = 160
_STOP_AT = 256
_DUE_AT = 320
_TICK_AT = 336
_DRILL_AT = 352
_WORK_AT = 384
_TIMES_AT = 512
_BODY = struct.Struct("<qIIqqqqqddqqqddIii")
_STOP = struct.Struct("<IId")
_DRILL = struct.Struct("<Id")
_COUNT = struct.Struct("<I")
_SENT = struct.Struct("<qI")  # 1 + the previous step, stages of this rank; then two counts per stage
_SENT_COUNT = struct.Struct("<H")
_MOST_STAGES = 16
"""Maximum number of stages per rank whose messages are counted."""
_DRILL_FIELDS = 8  # after the serial number


class Phase(IntEnum):
    """Current phase of a rank."""

    INIT = 0
    COMPILE = 1
    RESTORE = 2
    DATA = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    CHECKPOINT = 7
    EVAL = 8
    DONE = 9


SECTIONS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Phases in which a rank's own work is measured, in the order of `Work.sections`."""
_SECTION = {phase: index for index, phase in enumerate(SECTIONS)}
_WORK = struct.Struct(f"<q{len(SECTIONS)}q")
_ROW = struct.Struct(f"<{BUCKETS}I")


class StopReason(IntEnum):
    """Why the agent asks its rank to stop. If ranks have different reasons, the highest applies."""

    NONE = 0
    SAVE_AND_GO_ON = 1
    CANCEL = 2
    PREEMPTION = 3
    TIME_LIMIT = 4


@dataclass(kw_only=True, slots=True)
class Progress:
    """Consistent reading of a cell. Times are in nanoseconds on the node's CLOCK_MONOTONIC."""

    step: int = 0
    phase: Phase = Phase.INIT
    generation: int = 0
    collective: int = 0  # collectives and ring messages started by this rank in all its groups, as of `moved_at`
    io_bytes: int = 0  # training data read by this rank
    step_at: int = 0
    phase_at: int = 0
    moved_at: int = 0  # newest write of any kind, as a sign of life
    loss: float = 0.0
    grad_norm: float = 0.0
    saved_step: int = 0
    total_steps: int = 0
    restored_step: int = 0  # step restored in this generation; 0: from scratch
    save_seconds: float = 0.0  # 99th percentile of save durations, known to rank 0
    step_seconds: float = 0.0  # of the newest step
    activity: int = 0  # in a pipeline: read by `decode_activity`; 0: no activity
    stage: int = 0
    micro_batch: int = 0

    @property
    def moment(self) -> StageActivity | None:
        """Return the activity and micro-batch of this pipeline rank, or None outside the passes of a step."""
        return decode_activity(self.activity, self.stage, self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A rank's own work in its generation, in nanoseconds for each of `SECTIONS`, up to the run's step `steps`."""

    steps: int = 0
    sections: tuple[int, ...] = (0,) * len(SECTIONS)


_NAMES = tuple(item.name for item in fields(Progress))


class ProgressCell:
    """Seqlock over shared memory, with one writer (the rank), any number of readers, and no locks.

    The agent creates the memfd and the rank inherits its descriptor. Nothing is left in /dev/shm, and the last reading
    survives a held interpreter lock, a stopped process and a kill.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SIZE)
        # `struct` writes zeros first and then single bytes, so numbers that are read concurrently use a memoryview.
        self._words, self._floats = memoryview(self._map).cast("Q"), memoryview(self._map).cast("d")
        self._now = Progress()
        self._sequence = 0
        self._warm = False

    @classmethod
    def create(cls, name: str = "orch-progress") -> "ProgressCell":
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, SIZE)
        return cls(descriptor)

    # -- the rank's side

    def update(self, **changes: float) -> None:
        """Change some fields of the reading. `step` and `phase` also set their timestamps."""
        now, at = self._now, time.monotonic_ns()
        for name, value in changes.items():
            setattr(now, name, value)
        if "step" in changes:
            now.step_at = at
        if "phase" in changes:
            now.phase_at = at
        self._publish(at)

    def enter(self, phase: Phase, collective: int = 0, moment: StageActivity | None = None) -> None:
        """Enter another phase and record the duration of the previous one.

        `moment` is the pipeline activity in that phase. Durations before `start_timing` are not recorded, because a
        first step compiles and allocates.
        """
        now, at = self._now, time.monotonic_ns()
        if self._warm and now.phase != phase:
            place = _TIMES_AT + _ROW.size * now.phase + _COUNT.size * bucket((at - now.phase_at) * 1e-9)
            _COUNT.pack_into(self._map, place, _COUNT.unpack_from(self._map, place)[0] + 1)
        now.phase, now.phase_at = phase, at
        if collective:
            now.collective = collective
        self._set_moment(moment)
        self._publish(at)

    def begin_moment(self, moment: StageActivity | None) -> None:
        """Record another activity within the phase, such as waiting for another stage."""
        self._set_moment(moment)
        self._publish(time.monotonic_ns())

    def _set_moment(self, moment: StageActivity | None) -> None:
        now = self._now
        if moment is not None:
            now.activity, now.stage, now.micro_batch = moment.code, moment.stage, moment.micro_batch
        else:
            now.activity = 0

    def begin_passes(self, stages: int) -> None:
        """Reset the message counts at the start of a step's passes. `stages` is the number of stages on this rank."""
        size = _SENT_COUNT.size * 2 * min(stages, _MOST_STAGES)
        self._map[_SENT_AT + _SENT.size : _SENT_AT + _SENT.size + size] = bytes(size)
        _SENT.pack_into(self._map, _SENT_AT, self._now.step + 1, min(stages, _MOST_STAGES))

    def record_sent(self, place: int, is_gradient: bool, micro_batch: int) -> None:
        """Record that a stage has sent a micro-batch. `place` is its index among this rank's stages."""
        if place < _MOST_STAGES:
            at = _SENT_AT + _SENT.size + _SENT_COUNT.size * (2 * place + is_gradient)
            _SENT_COUNT.pack_into(self._map, at, min(micro_batch + 1, 65535))

    def add_input_bytes(self, size: int) -> None:
        """Count the bytes of training data read. They become visible with the next update."""
        self._now.io_bytes += size

    def start_timing(self) -> None:
        """Start recording durations, after the first step of this generation."""
        self._warm = True

    def record_work(self, steps: int, sections: list[int]) -> None:
        """Record this rank's own work so far (`Work`)."""
        _WORK.pack_into(self._map, _WORK_AT, steps, *sections)

    def tick(self) -> None:
        """Record a tick. A dedicated thread calls this regularly, as long as Python's lock is available."""
        self._words[_TICK_AT // 8] = time.monotonic_ns()

    def _publish(self, at: int) -> None:
        now = self._now
        now.moved_at = at
        sequence = self._sequence
        self._words[0] = sequence + 1
        _BODY.pack_into(
            self._map, 8, now.step, now.phase, now.generation, now.collective, now.io_bytes, now.step_at,
            now.phase_at, now.moved_at, now.loss, now.grad_norm, now.saved_step, now.total_steps, now.restored_step,
            now.save_seconds, now.step_seconds, now.activity, now.stage, now.micro_batch,
        )  # fmt: skip
        self._words[0] = sequence + 2
        self._sequence = sequence + 2

    def read_stop_request(self) -> tuple[StopReason, float]:
        """Return the agent's stop request, read at a step boundary."""
        reason, _, deadline = _STOP.unpack_from(self._map, _STOP_AT)
        return StopReason(reason), deadline

    def read_expected_stop(self) -> float:
        """Return the expected time of a stop, in seconds on CLOCK_MONOTONIC; 0: unknown."""
        return self._floats[_DUE_AT // 8]

    def read_drill_order(self) -> tuple[int, int, float]:
        """Return the newest drill as serial number (0: none so far), index in `KINDS`, and value."""
        (serial,) = _COUNT.unpack_from(self._map, _DRILL_AT)
        kind, value = _DRILL.unpack_from(self._map, _DRILL_AT + _DRILL_FIELDS)
        return serial, kind, value

    # -- the agent's side

    def read(self, tries: int = 1000) -> Progress | None:
        """Return a consistent reading, or None if the writer died in the middle of an update."""
        for _ in range(tries):
            before = self._words[0]
            body = _BODY.unpack_from(self._map, 8)
            if before == self._words[0] and before % 2 == 0:
                reading = Progress(**dict(zip(_NAMES, body, strict=True)))
                reading.phase = Phase(reading.phase)
                return reading
        return None

    def work(self) -> Work:
        """Return the rank's own work. It may be inconsistent for a single step, but not for sums over steps."""
        steps, *sections = _WORK.unpack_from(self._map, _WORK_AT)
        return Work(steps=steps, sections=tuple(sections))

    def sent(self) -> SentMessages | None:
        """Return the rank's sent messages in its newest passes, or None before its first passes."""
        step, stages = _SENT.unpack_from(self._map, _SENT_AT)
        if not step or not 0 < stages <= _MOST_STAGES:
            return None
        counts = struct.unpack_from(f"<{2 * stages}H", self._map, _SENT_AT + _SENT.size)
        return SentMessages(after_step=step - 1, activations=counts[::2], gradients=counts[1::2])

    def last_tick_ns(self) -> int:
        """Return the time of the last `tick` in nanoseconds on CLOCK_MONOTONIC; 0: never."""
        return self._words[_TICK_AT // 8]

    def times(self) -> dict[Phase, tuple[int, ...]]:
        """Return the durations of each phase as counts per `bucket`."""
        rows = {phase: _ROW.unpack_from(self._map, _TIMES_AT + _ROW.size * phase) for phase in Phase}
        return {phase: row for phase, row in rows.items() if any(row)}

    def program(self) -> ProgramRecord | None:
        """Return the start-up module's record, or None if the rank runs none."""
        return unpack_program(self._map)

    def ask_stop(self, reason: StopReason, deadline: float = 0.0) -> None:
        """Ask the rank to stop. `deadline` is in seconds on CLOCK_MONOTONIC; 0: no deadline.

        The cell stores one request. A stop request is never withdrawn, and a request with lower priority is dropped.
        """
        standing, _ = self.read_stop_request()
        if standing > StopReason.SAVE_AND_GO_ON and reason < standing:
            return
        _STOP.pack_into(self._map, _STOP_AT, int(reason), 0, deadline)

    def expect_stop(self, at: float) -> None:
        """Announce a stop at this time, in seconds on CLOCK_MONOTONIC; 0: none is planned."""
        self._floats[_DUE_AT // 8] = at

    def order_drill(self, kind: int, serial: int, value: float = 0.0) -> None:
        """Order the rank to inject a fault into itself at its next step boundary. `serial` counts up from 1."""
        _DRILL.pack_into(self._map, _DRILL_AT + _DRILL_FIELDS, kind, value)
        # The serial number is written last, so that a reader that sees a new number also finds its data.
        _COUNT.pack_into(self._map, _DRILL_AT, serial)

    def close(self) -> None:
        self._words.release()
        self._floats.release()
        self._map.close()
        os.close(self.descriptor)
