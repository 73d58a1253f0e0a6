"""The rhythm of a log: pauses between prints."""

from collections import deque
from dataclasses import dataclass, field

_KEPT = 64
"""Number of pauses between prints from which the usual longest one is taken."""
_LEAST_PAUSES = 4


@dataclass(kw_only=True)
class LogRhythm:
    """Pauses between a rank's prints. Times are on this node's monotonic clock."""

    last: float = 0.0
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, now: float) -> None:
        if self.last:
            self.pauses.append(now - self.last)
        self.last = now

    def usual_gap(self) -> float:
        """Return the longest of the recent pauses, or 0 if there are too few of them."""
        return max(self.pauses) if len(self.pauses) >= _LEAST_PAUSES else 0.0
