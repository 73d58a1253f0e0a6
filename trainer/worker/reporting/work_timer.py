"""Time of a rank's own work by section, and its waits in collectives."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from trainer.contract.ranks.progress import SECTIONS, Phase

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """What marks points in the work of a device."""

    def mark(self) -> Mark:
        """This point."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two points; may wait for the device to reach them."""


class HostClock:
    """Of a CPU, which has done everything that it was asked for."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, first: float, last: float) -> float:
        return last - first


class StreamClock:
    """Of a GPU's current stream: to wait for a receive holds up the stream and not the host."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


class WaitMeter(Generic[Mark]):
    """Adds up waits, step by step; a wait that has begun ends with the next `end`."""

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock = clock
        self._begun: Mark | None = None
        self._step: list[tuple[Mark, Mark]] = []
        self._before: list[tuple[Mark, Mark]] = []

    def begin(self) -> None:
        """What follows is a wait."""
        self.end()
        self._begun = self._clock.mark()

    def end(self) -> None:
        """The wait is over, where one has begun."""
        if self._begun is not None:
            self._step.append((self._begun, self._clock.mark()))
            self._begun = None

    def step_ended(self) -> float:
        """Seconds of the step before the one that ends now: by now a GPU, too, has come to its end."""
        self.end()
        ready, self._before, self._step = self._before, self._step, []
        return sum(self._clock.seconds(*wait) for wait in ready)


def wait_meter(device: torch.device) -> "WaitMeter[float] | WaitMeter[torch.cuda.Event]":
    """A meter with the clock of this kind of device."""
    return WaitMeter(StreamClock()) if device.type == "cuda" else WaitMeter(HostClock())


_DATA = SECTIONS.index(Phase.DATA)


class Stopwatch(Protocol):
    """Adds up nanoseconds by section."""

    counts_waits: bool
    """Whether a wait for a message counts, unless the time belongs to no section meanwhile."""

    def switch_to(self, section: int | None) -> None:
        """From now on the time belongs to this section, or to none."""

    def total(self) -> list[int]:
        """Nanoseconds in each of `SECTIONS`, as far as they are known."""


class CpuStopwatch:
    """Of a rank on the CPU: the time its thread was running, a thread that waits in gloo does not run.

    Loading data counts by the clock, because its work is done elsewhere, by disks and other processes.
    """

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
    """Of a rank on a GPU: time between events in its stream, read when they have come to pass, never waited for.

    Not exercised on a GPU yet; its arithmetic is tested with events of a stand-in.
    """

    counts_waits = True

    def __init__(self, event: Callable[[], Any]) -> None:
        """`event` makes one that can be timed: `torch.cuda.Event(enable_timing=True)`."""
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
        # Data is loaded by the host: nothing in the stream says how long it took.
        if ended == _DATA:
            self._total[ended] += time.monotonic_ns() - self._clock
        self._clock = time.monotonic_ns()

    def total(self) -> list[int]:
        while self._open and self._open[0][2].query():
            section, begin, end = self._open.popleft()
            self._total[section] += int(begin.elapsed_time(end) * 1e6)
        return self._total


def stopwatch(device: torch.device) -> Stopwatch:
    """What fits the rank's device."""
    return CpuStopwatch() if device.type == "cpu" else CudaStopwatch(lambda: torch.cuda.Event(enable_timing=True))


def exclude_fsdp_waits(model: nn.Module, pause: Callable[[], None], resume: Callable[[], None]) -> None:
    """Have `pause` and `resume` called around every wait for parameters that FSDP gathers, and `pause` before its last.

    A stream waits for a collective as it does for a kernel: without this a slow peer would look like own work. FSDP's
    hooks are there already, so that ours stand before them (prepended) and behind them (appended).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_ignoring_arguments(pause), prepend=True)
            module.register_forward_pre_hook(_ignoring_arguments(resume))
            module.register_forward_hook(_when_gradient_arrives(_also_after_backward(pause)), prepend=True)
            module.register_forward_hook(_when_gradient_arrives(resume))


def _also_after_backward(pause: Callable[[], None]) -> Callable[[], None]:
    """Once more at the end of the backward pass, before FSDP waits there for the gradients that it has scattered.

    Callbacks run in the order in which they were queued, and FSDP queues its own in the hook that follows the first.
    """

    def paused() -> None:
        pause()
        Variable._execution_engine.queue_callback(pause)

    return paused


def _ignoring_arguments(call: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: call()


def _when_gradient_arrives(call: Callable[[], None]) -> Callable[..., None]:
    """A forward hook: call when the gradient of the output is there, where the module's backward begins."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_ignoring_arguments(call))

    return hook
