"""Fake clock that moves only on request."""

from orchestrator.observed_since import Clock


class FakeClock:
    """Wall and monotonic time of one simulated world, in seconds."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self.error = 0.0
        """Error of the wall clock in seconds."""

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wall(self) -> float:
        return self.now + self.error

    def as_clock(self) -> Clock:
        return Clock(wall=self.wall, mono=self)
