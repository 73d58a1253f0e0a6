"""How long each stage of this rank computed, and how long it waited in receives, measured."""

from typing import Generic, TypeVar

import torch

from trainer.contract.pipeline.bubble import RankSeconds
from trainer.worker.device_clock import Clock, HostClock, StreamClock
from trainer.worker.pipeline.activities import EXPOSED_SENDS, WAITS, Activity, Call, Moment

Mark = TypeVar("Mark")
_SENDS = (Activity.SEND_ACTIVATION, Activity.SEND_GRADIENT)


class BubbleMeter(Generic[Mark]):
    """A watcher that measures one step after the other; `take` gives what was measured since `start`."""

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock, self._mark = clock, clock.mark
        self._moments: list[tuple[Moment, Mark, Mark]] = []
        self._start = self._begin = clock.mark()

    def start(self) -> None:
        """A step begins."""
        self._moments.clear()
        self._start = self._clock.mark()

    def begin_of(self, moment: Moment) -> Call | None:
        """Of a send, which begins and is not waited for, nothing is measured."""
        return None if moment.activity in _SENDS else self._begins

    def _begins(self) -> None:
        self._begin = self._mark()

    def end_of(self, moment: Moment) -> Call | None:
        """As `begin_of`."""
        if moment.activity in _SENDS:
            return None

        def end() -> None:
            self._moments.append((moment, self._begin, self._mark()))

        return end

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
            else:
                computed[moment.stage] = computed.get(moment.stage, 0.0) + seconds
                span = self._clock.seconds(self._start, end)
        return RankSeconds(span=span, computed=computed, waited=waited, sends=sends, reductions=reductions)


def meter_for(device: torch.device) -> "BubbleMeter[float] | BubbleMeter[torch.cuda.Event]":
    """A meter with the clock of this kind of device."""
    return BubbleMeter(StreamClock()) if device.type == "cuda" else BubbleMeter(HostClock())
