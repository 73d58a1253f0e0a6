"""For how long a rank waits in the collectives of its steps: communication that nothing hides."""

from typing import Generic, TypeVar

import torch

from trainer.worker.device_clock import Clock, HostClock, StreamClock

Mark = TypeVar("Mark")


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
