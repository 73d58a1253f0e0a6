"""Faults injected on purpose: `drill.events` of the configuration, fired by the rank they hit."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from trainer.contract.drills import DrillEvent


class DrillError(RuntimeError):
    """The exception that a `raise` drill throws into the training loop."""


class Drill:
    """The events of one rank in one generation; `announce` is called with (kind, step) before each fires."""

    def __init__(
        self, events: Sequence[DrillEvent], *, rank: int, attempt: int, generation: int,
        announce: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._events = [
            event
            for event in events
            if event.rank == rank and event.attempt in (0, attempt) and event.generation in (0, generation)
        ]
        self._announce = announce

    def after_step(self, step: int) -> None:
        """Fire what is due when this rank has finished `step`."""
        for event in self._events:
            if event.kind == "slow-rank" and step >= event.step:
                if step == event.step:
                    self._announce(event.kind, step)
                time.sleep(event.value)
            elif step == event.step:
                self._announce(event.kind, step)
                _fire(event)


def _fire(event: DrillEvent) -> None:
    if event.kind == "kill-rank":
        os.kill(os.getpid(), signal.SIGKILL)
    raise DrillError(f"drill: raised on rank {event.rank} after step {event.step}")
