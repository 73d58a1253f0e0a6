"""Injected faults from `drill.events` in the configuration, or ordered during the run through the progress cell.

Each fault fires in its step. Faults that a rank can only cause between two steps fire after the step.
"""

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from trainer.parallel.apply.gradient_buckets import StepSums
from trainer.protocol.config_sections.fault_detection_config import KINDS, DrillEvent

_AFTER_STEP = frozenset({"kill-rank", "stop-rank", "raise"})
_KINDS = tuple(KINDS)


class DrillError(RuntimeError):
    """Exception that a `raise` drill raises in the training loop."""


class Orders(Protocol):
    """The part of the progress cell through which an agent orders a drill."""

    def read_drill_order(self) -> tuple[int, int, float]: ...


class Drill:
    """Drill events of one rank in one generation. `announce` is called with kind and step before each event fires."""

    def __init__(
        self, events: Sequence[DrillEvent], *, rank: int, attempt: int, generation: int,
        announce: Callable[[str, int], None], orders: Orders | None = None,
    ) -> None:  # fmt: skip
        self._events = [
            event
            for event in events
            if event.rank == rank and event.attempt in (0, attempt) and event.generation in (0, generation)
        ]
        self._rank, self._announce, self._orders = rank, announce, orders
        self._serial = orders.read_drill_order()[0] if orders is not None else 0
        self._announced: set[DrillEvent] = set()

    # -- injection points, in the order of a step's work

    def in_data(self, step: int) -> None:
        """Inject faults before the batch of `step` is taken."""
        self._inject("hang-in-data", step, _wait)

    def in_forward(self, step: int) -> None:
        """Inject faults at the start of the forward pass of `step`."""
        for event in self._events:
            if event.kind == "slow-rank" and step >= event.step:
                self._announce_once(event, step)
                _spin(event.value)
        self._inject("hang-in-forward", step, _wait)
        self._inject("hold-lock", step, _hold_lock)

    def in_send(self, step: int) -> bool:
        """Inject faults before a stage sends data, at most once per step. Return whether the stage may send."""
        self._inject("hang-in-send", step, _wait, once=True)
        return not self._inject("skip-send", step, lambda _: None, once=True)

    def loss_factor(self, step: int) -> float:
        """Return the factor for the loss of `step`."""
        factor = 1.0
        for kind, size in (("nan", math.nan), ("spike", 1000.0)):
            for event in self._due(kind, step):
                self._announce_once(event, step)
                factor *= size
        return factor

    def before_reduce(self, step: int) -> None:
        """Inject faults before the collective of all ranks at the end of `step`."""
        self._inject("hang-in-collective", step, _wait)
        self._inject("desync-shape", step, _call_other_shape)
        self._inject("desync-order", step, _call_other_order)

    def in_save(self, step: int) -> None:
        """Inject faults at the start of the save of `step` or of the first save after it."""
        for event in [event for event in self._events if event.kind == "hang-in-save" and step >= event.step]:
            self._events.remove(event)
            self._announce_once(event, step)
            _wait(event.value)

    def after_step(self, step: int) -> None:
        """Inject faults scheduled for the end of `step`, and read orders."""
        self._receive_order(step)
        self._inject("kill-rank", step, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        self._inject("stop-rank", step, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
        self._inject("raise", step, lambda _: _raise(self._rank, step))

    def _due(self, kind: str, step: int) -> list[DrillEvent]:
        return [event for event in self._events if event.kind == kind and event.step == step]

    def _inject(self, kind: str, step: int, fire: Callable[[float], None], *, once: bool = False) -> bool:
        """Fire the events that are due and return whether there were any. `once` is for code that runs repeatedly."""
        due = self._due(kind, step)
        for event in due:
            if once:
                self._events.remove(event)
            self._announce_once(event, step)
            fire(event.value)
        return bool(due)

    def _announce_once(self, event: DrillEvent, step: int) -> None:
        if event not in self._announced:
            self._announced.add(event)
            self._announce(event.kind, step)

    def _receive_order(self, step: int) -> None:
        """Read an order, which fires now or in the next step."""
        serial, kind, value = self._orders.read_drill_order() if self._orders is not None else (0, 0, 0.0)
        if serial == self._serial or kind >= len(_KINDS):
            return
        self._serial, name = serial, _KINDS[kind]
        at = step if name in _AFTER_STEP else step + 1
        self._events.append(DrillEvent(kind=name, rank=self._rank, step=at, value=value))


def _raise(rank: int, step: int) -> None:
    raise DrillError(f"drill: raised on rank {rank} after step {step}")


def _wait(seconds: float) -> None:
    """Sleep for `seconds`, or forever if 0."""
    time.sleep(seconds)
    while not seconds:
        time.sleep(3600)


def _spin(seconds: float) -> None:
    """Use CPU time in this thread, or GPU time if there is a GPU, so that the work is measurable."""
    if torch.cuda.is_initialized():
        # Roughly this many cycles per nanosecond; the exact duration does not matter.
        torch.cuda._sleep(int(seconds * 1.5e9))
        return
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _hold_lock(seconds: float) -> None:
    """Deadlock in C with the GIL held, like a faulty extension module. Unlike a sleep, no signal interrupts it."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeroed, which is PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    if not seconds:
        libc.pthread_mutex_lock(mutex)
    until, rest = divmod(time.time() + seconds, 1)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(rest * 1e9)))


def _call_other_shape(size: float) -> None:
    StepSums(torch.ones(int(size) or 1, dtype=torch.float64, device=_device()), step=0).wait()


def _call_other_order(_: float) -> None:
    """Call one collective more than the peers, so that every later collective is mismatched."""
    dist.broadcast(torch.ones(1, device=_device()), src=(dist.get_rank() + 1) % dist.get_world_size())


def _device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"
