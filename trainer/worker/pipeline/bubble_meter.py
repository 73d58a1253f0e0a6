"""How long each stage of this rank computed, and how long it waited in receives, measured."""

import time
from typing import Generic, Protocol, TypeVar

import torch

from trainer.contract.pipeline.bubble import RankSeconds
from trainer.worker.pipeline.activities import EXPOSED_SENDS, WAITS, Activity, Moment

Mark = TypeVar("Mark")
_SENDS = (Activity.SEND_ACTIVATION, Activity.SEND_GRADIENT)
"""They begin and are not waited for."""


class Clock(Protocol[Mark]):
    """What marks points in the work of a device."""

    def mark(self) -> Mark:
        """This point."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two points; may wait for the device to reach them."""


class HostClock:
    """Of a CPU, which has done everything that it was asked for."""

    def mark(self) -> float:
        return time.perf_counter()

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


class BubbleMeter(Generic[Mark]):
    """A watcher that measures one step after the other; `take` gives what was measured since `start`."""

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock = clock
        self._moments: list[tuple[Moment, Mark, Mark]] = []
        self._start = self._begin = clock.mark()

    def start(self) -> None:
        """A step begins."""
        self._moments.clear()
        self._start = self._clock.mark()

    def begin(self, moment: Moment) -> None:
        self._begin = self._clock.mark()

    def end(self, moment: Moment) -> None:
        self._moments.append((moment, self._begin, self._clock.mark()))

    def take(self) -> RankSeconds:
        """Of the step that has ended; on a GPU it waits for the stream, so ask a step later."""
        computed: dict[int, float] = {}
        waited: dict[int, float] = {}
        span = sends = reductions = 0.0
        for moment, begin, end in self._moments:
            seconds = self._clock.seconds(begin, end)
            if moment.activity in EXPOSED_SENDS:
                sends += seconds
            elif moment.activity is Activity.REDUCE:
                reductions += seconds
            elif moment.activity in WAITS:
                waited[moment.stage] = waited.get(moment.stage, 0.0) + seconds
            elif moment.activity not in _SENDS:
                computed[moment.stage] = computed.get(moment.stage, 0.0) + seconds
                span = self._clock.seconds(self._start, end)
        return RankSeconds(span=span, computed=computed, waited=waited, sends=sends, reductions=reductions)


def meter_for(device: torch.device) -> "BubbleMeter[float] | BubbleMeter[torch.cuda.Event]":
    """A meter with the clock of this kind of device."""
    return BubbleMeter(StreamClock()) if device.type == "cuda" else BubbleMeter(HostClock())
