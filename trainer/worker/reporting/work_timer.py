"""Timers for a rank's own work in each section, and for its waits in collectives."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from trainer.protocol.rank_progress.progress import SECTIONS, Phase


class DeviceClock(Protocol):
    """Clock that marks points in a device's work."""

    def mark(self) -> Any:
        """Return a mark for this point."""

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks. May wait for the device to reach them."""


class HostClock:
    """CPU clock. On a CPU, work is complete when its call returns."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, first: float, last: float) -> float:
        return last - first


class StreamClock:
    """Clock of a GPU's current stream. Waiting for a receive blocks the stream, not the host."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


def device_clock(device: torch.device) -> DeviceClock:
    """Return the clock for this kind of device."""
    return StreamClock() if device.type == "cuda" else HostClock()


class WaitMeter:
    """Measures the seconds waited in each step."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._begun: Any = None
        self._step: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Start a wait."""
        self.end()
        self._begun = self._clock.mark()

    def end(self) -> None:
        """End the current wait, if any."""
        if self._begun is not None:
            self._step.append((self._begun, self._clock.mark()))
            self._begun = None

    def step_ended(self) -> float:
        """End a step and return the seconds waited in the previous step, which a GPU has finished by now."""
        self.end()
        ready, self._before, self._step = self._before, self._step, []
        return sum(self._clock.seconds(*wait) for wait in ready)


_DATA = SECTIONS.index(Phase.DATA)


class Stopwatch(Protocol):
    """Total nanoseconds per section."""

    counts_waits: bool
    """Whether a wait for a message counts as work unless the section is paused."""

    def switch_to(self, section: int | None) -> None:
        """Count time for this section from now on, or for no section."""

    def total(self) -> list[int]:
        """Return the nanoseconds measured so far in each of `SECTIONS`."""


class CpuStopwatch:
    """Stopwatch for a CPU rank. It counts wall time while loading data, and otherwise its thread's CPU time."""

    counts_waits = False

    def __init__(self) -> None:
        self._total = [0] * len(SECTIONS)
        self._section: int | None = None
        self._running = self._clock = 0

    def switch_to(self, section: int | None) -> None:
        running, clock, ended = time.thread_time_ns(), time.monotonic_ns(), self._section
        if ended == _DATA:
            self._total[ended] += clock - self._clock
        elif ended is not None:
            self._total[ended] += running - self._running
        self._section, self._running, self._clock = section, running, clock

    def total(self) -> list[int]:
        return self._total


class CudaStopwatch:
    """Stopwatch for a GPU rank. It counts time between completed events in its stream. Not yet tested on a GPU."""

    counts_waits = True

    def __init__(self, event: Callable[[], Any]) -> None:
        """`event` creates a timing event, like `torch.cuda.Event(enable_timing=True)`."""
        self._event = event
        self._total = [0] * len(SECTIONS)
        self._section: int | None = None
        self._begin: Any = None
        self._clock = 0
        self._open: deque[tuple[int, Any, Any]] = deque()

    def switch_to(self, section: int | None) -> None:
        ended, begin = self._section, self._begin
        self._section, self._begin = section, None
        on_stream = section is not None and section != _DATA
        mark = self._event() if begin is not None or on_stream else None
        if mark is not None:
            mark.record()
        if ended is not None and begin is not None:
            self._open.append((ended, begin, mark))
        if on_stream:
            self._begin = mark
        # The host loads the data, so the stream does not show how long that takes.
        if ended == _DATA:
            self._total[ended] += time.monotonic_ns() - self._clock
        self._clock = time.monotonic_ns()

    def total(self) -> list[int]:
        while self._open and self._open[0][2].query():
            section, begin, end = self._open.popleft()
            self._total[section] += int(begin.elapsed_time(end) * 1e6)
        return self._total


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for the rank's device."""
    return CpuStopwatch() if device.type == "cpu" else CudaStopwatch(lambda: torch.cuda.Event(enable_timing=True))


def exclude_fsdp_waits(model: nn.Module, pause: Callable[[], None], resume: Callable[[], None]) -> None:
    """Call `pause` and `resume` around every wait for parameters that FSDP gathers, and `pause` before its last wait.

    A stream waits for a collective as it does for a kernel, so a slow peer would otherwise look like this rank's own
    work. FSDP's hooks are already installed, so prepended hooks run before them and appended hooks run after them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_ignoring_arguments(pause), prepend=True)
            module.register_forward_pre_hook(_ignoring_arguments(resume))
            module.register_forward_hook(_when_gradient_arrives(_also_after_backward(pause)), prepend=True)
            module.register_forward_hook(_when_gradient_arrives(resume))


def _also_after_backward(pause: Callable[[], None]) -> Callable[[], None]:
    """Return a function that pauses now and at the end of the backward pass, before FSDP waits for gradients."""

    def pause_twice() -> None:
        pause()
        Variable._execution_engine.queue_callback(pause)

    return pause_twice


def _ignoring_arguments(call: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: call()


def _when_gradient_arrives(call: Callable[[], None]) -> Callable[..., None]:
    """Return a forward hook that calls `call` when the output's gradient arrives, at the start of its backward pass."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_ignoring_arguments(call))

    return hook
