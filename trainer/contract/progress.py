"""The progress cell: one page of memory that a rank writes without system calls and its agent reads."""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

SIZE = 4096
_STOP_AT = 2048
_DUE_AT = 2112
_SEQ = struct.Struct("<Q")
_BODY = struct.Struct("<qIIqqqqddqqqdd")
_STOP = struct.Struct("<IId")
_DUE = struct.Struct("<d")


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


class StopReason(IntEnum):
    """Why the agent asks its rank to stop; higher numbers win when ranks were told different ones."""

    NONE = 0
    SAVE_AND_GO_ON = 1
    CANCEL = 2
    PREEMPTION = 3
    TIME_LIMIT = 4


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One consistent reading of a cell; times are nanoseconds of CLOCK_MONOTONIC on the node."""

    step: int = 0
    phase: Phase = Phase.INIT
    generation: int = 0
    collective: int = 0
    io_bytes: int = 0
    step_at: int = 0
    phase_at: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    saved_step: int = 0
    total_steps: int = 0
    restored_step: int = 0  # where this generation began: 0 from scratch
    save_seconds: float = 0.0  # 99th percentile of what saves have taken, known to rank 0
    step_seconds: float = 0.0  # of the newest step


class ProgressCell:
    """A seqlock over shared memory: one writer (the rank), any number of readers, no locks.

    The agent makes the memfd; the rank inherits its descriptor, so nothing is left in /dev/shm and the
    last reading survives a held interpreter lock, a stopped process and a kill.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SIZE)
        self._now = Progress()

    @classmethod
    def create(cls, name: str = "orch-progress") -> "ProgressCell":
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, SIZE)
        return cls(descriptor)

    def update(self, **changes: float) -> None:
        """Rank side: change some fields of the reading; `step` and `phase` stamp their times."""
        now = time.monotonic_ns()
        fields = {**self._now.__dict__, **changes}
        fields["step_at"] = now if "step" in changes else fields["step_at"]
        fields["phase_at"] = now if "phase" in changes else fields["phase_at"]
        self._now = Progress(**{**fields, "phase": Phase(fields["phase"])})
        (sequence,) = _SEQ.unpack_from(self._map, 0)
        _SEQ.pack_into(self._map, 0, sequence + 1)
        _BODY.pack_into(self._map, 8, *self._packed())
        _SEQ.pack_into(self._map, 0, sequence + 2)

    def _packed(self) -> tuple[float, ...]:
        now = self._now
        return (
            now.step, int(now.phase), now.generation, now.collective, now.io_bytes, now.step_at,
            now.phase_at, now.loss, now.grad_norm, now.saved_step, now.total_steps, now.restored_step,
            now.save_seconds, now.step_seconds,
        )  # fmt: skip

    def read(self, tries: int = 1000) -> Progress | None:
        """A consistent reading, or None when the writer died in the middle of an update."""
        for _ in range(tries):
            (before,) = _SEQ.unpack_from(self._map, 0)
            body = _BODY.unpack_from(self._map, 8)
            (after,) = _SEQ.unpack_from(self._map, 0)
            if before == after and before % 2 == 0:
                return _progress(body)
        return None

    def ask_stop(self, reason: StopReason, deadline: float = 0.0) -> None:
        """Agent side: ask the rank to stop; `deadline` is in seconds of CLOCK_MONOTONIC, 0 for none.

        There is one slot, and a stop that stands in it is never taken back: a lesser wish is dropped.
        """
        standing, _ = self.stop_asked()
        if standing > StopReason.SAVE_AND_GO_ON and reason < standing:
            return
        _STOP.pack_into(self._map, _STOP_AT, int(reason), 0, deadline)

    def stop_asked(self) -> tuple[StopReason, float]:
        """Rank side: what the agent asks for, read at a step boundary."""
        reason, _, deadline = _STOP.unpack_from(self._map, _STOP_AT)
        return StopReason(reason), deadline

    def expect_stop(self, at: float) -> None:
        """Agent side: a stop will be asked for at this time, in seconds of CLOCK_MONOTONIC; 0 when none is planned."""
        _DUE.pack_into(self._map, _DUE_AT, at)

    def stop_due(self) -> float:
        """Rank side: when a stop is expected, in seconds of CLOCK_MONOTONIC; 0 when nothing is known."""
        due: float = _DUE.unpack_from(self._map, _DUE_AT)[0]
        return due

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)


def _progress(body: tuple[float, ...]) -> Progress:
    (
        step,
        phase,
        generation,
        collective,
        io_bytes,
        step_at,
        phase_at,
        loss,
        norm,
        saved,
        total,
        restored,
        save,
        length,
    ) = body
    return Progress(
        step=int(step), phase=Phase(int(phase)), generation=int(generation), collective=int(collective),
        io_bytes=int(io_bytes), step_at=int(step_at), phase_at=int(phase_at), loss=loss, grad_norm=norm,
        saved_step=int(saved), total_steps=int(total), restored_step=int(restored),
        save_seconds=save, step_seconds=length,
    )  # fmt: skip
