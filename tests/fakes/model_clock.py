"""A clock that moves only when it is told to."""

from orchestrator.controller.watch import Clock


class FakeClock:
    """Wall and monotonic time of one simulated world, in seconds."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def as_clock(self) -> Clock:
        return Clock(wall=self, mono=self)
