"""Clocks that mark points in the work of a device: of a CPU, and of a GPU's stream."""

import time
from typing import Protocol, TypeVar

import torch

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
