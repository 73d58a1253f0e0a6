"""Faults injected on purpose: `drill.events` of the configuration, or ordered while the run goes on through the cell.

Each strikes in the step that it names; those that a rank can only bring upon itself between two steps strike after it.
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

from trainer.contract.config_sections.fault_detection_config import KINDS, DrillEvent
from trainer.worker.parallel.gradient_buckets import StepSums

_AFTER_STEP = frozenset({"kill-rank", "stop-rank", "raise"})
_KINDS = tuple(KINDS)


class DrillError(RuntimeError):
    """The exception that a `raise` drill throws into the training loop."""


class Orders(Protocol):
    """The part of the progress cell through which an agent orders a drill."""

    def read_drill_order(self) -> tuple[int, int, float]: ...


class Drill:
    """The events of one rank in one generation; `announce` is called with (kind, step) before each fires."""

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

    # -- where it may strike, in the order of a step

    def in_data(self, step: int) -> None:
        """Before the batch of `step` is taken."""
        self._inject("hang-in-data", step, _wait)

    def in_forward(self, step: int) -> None:
        """At the beginning of the forward pass of `step`."""
        for event in self._events:
            if event.kind == "slow-rank" and step >= event.step:
                self._announce_once(event, step)
                _spin(event.value)
        self._inject("hang-in-forward", step, _wait)
        self._inject("hold-lock", step, _hold_lock)

    def in_send(self, step: int) -> bool:
        """Before a stage sends something; whether it may. Strikes once in a step."""
        self._inject_once("hang-in-send", step, _wait)
        return not self._inject_once("skip-send", step, lambda _: None)

    def loss_factor(self, step: int) -> float:
        """What the loss of `step` is multiplied with."""
        factor = 1.0
        for kind, size in (("nan", math.nan), ("spike", 1000.0)):
            for event in self._due(kind, step):
                self._announce_once(event, step)
                factor *= size
        return factor

    def before_reduce(self, step: int) -> None:
        """Before the collective in which all ranks meet at the end of `step`."""
        self._inject("hang-in-collective", step, _wait)
        self._inject("desync-shape", step, _call_other_shape)
        self._inject("desync-order", step, _call_other_order)

    def in_save(self, step: int) -> None:
        """When the save of `step`, or the first one after it, begins."""
        for event in [event for event in self._events if event.kind == "hang-in-save" and step >= event.step]:
            self._events.remove(event)
            self._announce_once(event, step)
            _wait(event.value)

    def after_step(self, step: int) -> None:
        """Fire what is due when this rank has finished `step`, and hear what is ordered."""
        self._receive_order(step)
        self._inject("kill-rank", step, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        self._inject("stop-rank", step, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
        for event in self._due("raise", step):
            self._announce_once(event, step)
            raise DrillError(f"drill: raised on rank {event.rank} after step {event.step}")

    def _due(self, kind: str, step: int) -> list[DrillEvent]:
        return [event for event in self._events if event.kind == kind and event.step == step]

    def _inject(self, kind: str, step: int, fire: Callable[[float], None]) -> None:
        for event in self._due(kind, step):
            self._announce_once(event, step)
            fire(event.value)

    def _inject_once(self, kind: str, step: int, fire: Callable[[float], None]) -> bool:
        """As `_inject`, where a step comes by several times; whether it has struck now."""
        due = self._due(kind, step)
        for event in due:
            self._events.remove(event)
            self._announce_once(event, step)
            fire(event.value)
        return bool(due)

    def _announce_once(self, event: DrillEvent, step: int) -> None:
        if event not in self._announced:
            self._announced.add(event)
            self._announce(event.kind, step)

    def _receive_order(self, step: int) -> None:
        """Take up an order: it strikes at once, or in the step that comes now."""
        serial, kind, value = self._orders.read_drill_order() if self._orders is not None else (0, 0, 0.0)
        if serial == self._serial or kind >= len(_KINDS):
            return
        self._serial, name = serial, _KINDS[kind]
        at = step if name in _AFTER_STEP else step + 1
        self._events.append(DrillEvent(kind=name, rank=self._rank, step=at, value=value))


def _wait(seconds: float) -> None:
    """For so long, or for ever."""
    time.sleep(seconds)
    while not seconds:
        time.sleep(3600)


def _spin(seconds: float) -> None:
    """Work that shows: in the thread's own time on the CPU, and on the GPU if there is one."""
    if torch.cuda.is_initialized():
        # About so many cycles a nanosecond; how long it really takes does not matter.
        torch.cuda._sleep(int(seconds * 1.5e9))
        return
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _hold_lock(seconds: float) -> None:
    """Deadlock in C without giving Python's lock back, as an extension module with a bug does.

    The lock that waits for itself is not woken by signals, as a sleep would be.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeroed, which is PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    if not seconds:
        libc.pthread_mutex_lock(mutex)
    until, rest = divmod(time.time() + seconds, 1)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(rest * 1e9)))


def _call_other_shape(size: float) -> None:
    """In the place of the step's sums, those of another row."""
    StepSums(torch.ones(int(size) or 1, dtype=torch.float64, device=_device()), step=0).wait()


def _call_other_order(_: float) -> None:
    """One collective more than the peers: every later one meets another."""
    dist.broadcast(torch.ones(1, device=_device()), src=(dist.get_rank() + 1) % dist.get_world_size())


def _device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"
