"""The progress cell that a rank writes and its agent reads, and the signals that ranks outlive.

Only agents act on them. An ignored signal would stay ignored in every program that a rank starts, and a blocked one
blocked, so a process outlives them by handlers that do nothing: `exec` resets those, and hooks reset them in forks.
"""

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from types import FrameType

from trainer.contract.ranks.duration_histogram import BUCKETS, bucket
from trainer.contract.ranks.stage_activity import CODES, Moment, SentMessages, moment_of

STEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Warnings before a time limit (orch asks for USR2, other tools for USR1), the end of a step, and `scancel -s INT`."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def block_step_signals() -> Iterator[None]:
    """Hold the signals back while a child is started: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_step_signals() -> None:
    """End what `block_step_signals` began, in the child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)


def outlive_step_signals() -> None:
    """Do nothing on these signals from now on, in this process only: its children have the defaults."""
    _reset_in_children()
    for number in STEP_SIGNALS:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)  # libraries that do not expect EINTR
    unblock_step_signals()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler of a process that outlives the signal."""


@cache
def _reset_in_children() -> None:
    """Have every fork begin with the defaults; a signal that comes in between waits for them."""
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
_SENT = struct.Struct("<qI")  # 1 + the step before, stages of this rank; then two counts for each of them
_SENT_COUNT = struct.Struct("<H")
_MOST_STAGES = 16
"""Of one rank, whose messages are counted."""
_DRILL_FIELDS = 8  # behind the serial number


class Phase(IntEnum):
    """What a rank is doing."""

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
"""The phases of a step whose own work is measured, in the order of `Work.sections`."""
_SECTION = {phase: index for index, phase in enumerate(SECTIONS)}
_WORK = struct.Struct(f"<q{len(SECTIONS)}q")
_ROW = struct.Struct(f"<{BUCKETS}I")


class StopReason(IntEnum):
    """Why the agent asks its rank to stop; the highest one wins when ranks got different ones."""

    NONE = 0
    SAVE_AND_GO_ON = 1
    CANCEL = 2
    PREEMPTION = 3
    TIME_LIMIT = 4


@dataclass(kw_only=True, slots=True)
class Progress:
    """One consistent reading of a cell; times are nanoseconds of CLOCK_MONOTONIC on the node."""

    step: int = 0
    phase: Phase = Phase.INIT
    generation: int = 0
    collective: int = 0  # collectives, and messages of a ring, begun by this rank in all its groups, as of `moved_at`
    io_bytes: int = 0  # of training data that this rank has taken
    step_at: int = 0
    phase_at: int = 0
    moved_at: int = 0  # newest write of any kind: the rank's own sign of life
    loss: float = 0.0
    grad_norm: float = 0.0
    saved_step: int = 0
    total_steps: int = 0
    restored_step: int = 0  # where this generation began: 0 from scratch
    save_seconds: float = 0.0  # 99th percentile of what saves have taken, known to rank 0
    step_seconds: float = 0.0  # of the newest step
    activity: int = 0  # of a pipeline: as `moment_of` reads it; 0: none
    stage: int = 0
    micro_batch: int = 0

    @property
    def moment(self) -> Moment | None:
        """What this rank of a pipeline does, with which micro-batch; None outside the passes of a step."""
        return moment_of(self.activity, self.stage, self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A rank's own work since its generation began: nanoseconds in each of `SECTIONS` up to the run's step `steps`."""

    steps: int = 0
    sections: tuple[int, ...] = (0,) * len(SECTIONS)


_NAMES = tuple(item.name for item in fields(Progress))


class ProgressCell:
    """A seqlock over shared memory: one writer (the rank), any number of readers, no locks.

    The agent makes the memfd; the rank inherits its descriptor, so nothing is left in /dev/shm and the
    last reading survives a held interpreter lock, a stopped process and a kill.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SIZE)
        # `struct` writes zeros, then byte by byte: numbers that are read meanwhile are stored in one piece.
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
        """Change some fields of the reading; `step` and `phase` stamp their times."""
        now, at = self._now, time.monotonic_ns()
        for name, value in changes.items():
            setattr(now, name, value)
        if "step" in changes:
            now.step_at = at
        if "phase" in changes:
            now.phase_at = at
        self._publish(at)

    def enter(self, phase: Phase, collective: int = 0, moment: Moment | None = None) -> None:
        """The rank goes on to another phase; the one it leaves is counted with the time it took.

        `moment`: what it does in that phase, in a pipeline.

        Nothing is counted before `warmed`: a first step compiles and allocates, and is no measure of the others.
        """
        now, at = self._now, time.monotonic_ns()
        if self._warm and now.phase != phase:
            place = _TIMES_AT + _ROW.size * now.phase + _COUNT.size * bucket((at - now.phase_at) * 1e-9)
            _COUNT.pack_into(self._map, place, _COUNT.unpack_from(self._map, place)[0] + 1)
        now.phase, now.phase_at = phase, at
        if collective:
            now.collective = collective
        if moment is not None:
            now.activity, now.stage, now.micro_batch = CODES[moment.activity], moment.stage, moment.micro_batch
        else:
            now.activity = 0
        self._publish(at)

    def begin_moment(self, moment: Moment | None) -> None:
        """A rank goes on to something else within its phase, as to wait for another stage."""
        now = self._now
        if moment is not None:
            now.activity, now.stage, now.micro_batch = CODES[moment.activity], moment.stage, moment.micro_batch
        else:
            now.activity = 0
        self._publish(time.monotonic_ns())

    def begin_passes(self, stages: int) -> None:
        """The passes of a step begin, on a rank with so many stages of a pipeline."""
        size = _SENT_COUNT.size * 2 * min(stages, _MOST_STAGES)
        self._map[_SENT_AT + _SENT.size : _SENT_AT + _SENT.size + size] = bytes(size)
        _SENT.pack_into(self._map, _SENT_AT, self._now.step + 1, min(stages, _MOST_STAGES))

    def record_sent(self, place: int, is_gradient: bool, micro_batch: int) -> None:
        """The stage at this place among those of this rank has the sending of a micro-batch behind it."""
        if place < _MOST_STAGES:
            at = _SENT_AT + _SENT.size + _SENT_COUNT.size * (2 * place + is_gradient)
            _SENT_COUNT.pack_into(self._map, at, min(micro_batch + 1, 65535))

    def add_input_bytes(self, size: int) -> None:
        """So many bytes of training data were taken; visible with the next change of anything."""
        self._now.io_bytes += size

    def start_timing(self) -> None:
        """The first step of this generation is over: from now on times count."""
        self._warm = True

    def record_work(self, steps: int, sections: list[int]) -> None:
        """This rank's own work so far, as `Work` describes it."""
        _WORK.pack_into(self._map, _WORK_AT, steps, *sections)

    def tick(self) -> None:
        """Called now and then by a thread that does nothing else: it can only run while Python's lock is to be had."""
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
        """What the agent asks for, read at a step boundary."""
        reason, _, deadline = _STOP.unpack_from(self._map, _STOP_AT)
        return StopReason(reason), deadline

    def read_expected_stop(self) -> float:
        """When a stop is expected, in seconds of CLOCK_MONOTONIC; 0 when nothing is known."""
        return self._floats[_DUE_AT // 8]

    def read_drill_order(self) -> tuple[int, int, float]:
        """The newest fault to be brought about: serial number (0: none so far), place in `drills.KINDS`, value."""
        (serial,) = _COUNT.unpack_from(self._map, _DRILL_AT)
        kind, value = _DRILL.unpack_from(self._map, _DRILL_AT + _DRILL_FIELDS)
        return serial, kind, value

    # -- the agent's side

    def read(self, tries: int = 1000) -> Progress | None:
        """A consistent reading, or None when the writer died in the middle of an update."""
        for _ in range(tries):
            before = self._words[0]
            body = _BODY.unpack_from(self._map, 8)
            if before == self._words[0] and before % 2 == 0:
                reading = Progress(**dict(zip(_NAMES, body, strict=True)))
                reading.phase = Phase(reading.phase)
                return reading
        return None

    def work(self) -> Work:
        """The rank's own work; sections of one step may be torn apart, sums over steps are not."""
        steps, *sections = _WORK.unpack_from(self._map, _WORK_AT)
        return Work(steps=steps, sections=tuple(sections))

    def sent(self) -> SentMessages | None:
        """How far the rank has come with sending in its newest passes; None where there were none."""
        step, stages = _SENT.unpack_from(self._map, _SENT_AT)
        if not step or not 0 < stages <= _MOST_STAGES:
            return None
        counts = struct.unpack_from(f"<{2 * stages}H", self._map, _SENT_AT + _SENT.size)
        return SentMessages(after_step=step - 1, activations=counts[::2], gradients=counts[1::2])

    def last_tick_ns(self) -> int:
        """When `tick` was called last, in nanoseconds of CLOCK_MONOTONIC; 0: never."""
        return self._words[_TICK_AT // 8]

    def times(self) -> dict[Phase, tuple[int, ...]]:
        """How often each phase took how long: counts in the buckets of `trainer.contract.ranks.stage_activity`."""
        rows = {phase: _ROW.unpack_from(self._map, _TIMES_AT + _ROW.size * phase) for phase in Phase}
        return {phase: row for phase, row in rows.items() if any(row)}

    def ask_stop(self, reason: StopReason, deadline: float = 0.0) -> None:
        """Ask the rank to stop; `deadline` is in seconds of CLOCK_MONOTONIC, 0 for none.

        There is one slot, and a stop that stands in it is never taken back: a lesser wish is dropped.
        """
        standing, _ = self.read_stop_request()
        if standing > StopReason.SAVE_AND_GO_ON and reason < standing:
            return
        _STOP.pack_into(self._map, _STOP_AT, int(reason), 0, deadline)

    def expect_stop(self, at: float) -> None:
        """A stop will be asked for at this time, in seconds of CLOCK_MONOTONIC; 0 when none is planned."""
        self._floats[_DUE_AT // 8] = at

    def order_drill(self, kind: int, serial: int, value: float = 0.0) -> None:
        """Have the rank bring a fault upon itself at its next step boundary; `serial` counts up from 1."""
        _DRILL.pack_into(self._map, _DRILL_AT + _DRILL_FIELDS, kind, value)
        # Last: a reader that sees the new number finds what belongs to it.
        _COUNT.pack_into(self._map, _DRILL_AT, serial)

    def close(self) -> None:
        self._words.release()
        self._floats.release()
        self._map.close()
        os.close(self.descriptor)
