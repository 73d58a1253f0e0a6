"""PURE: how long another side has said nothing, the time left out in which this process itself stood still."""

POLL_SECONDS = 2.0
"""Who listens looks up so often."""
LATE_SECONDS = 3.0
"""A look that was due so long ago tells that this process had no time: it was suspended, or starved."""


class PeerTimeout:
    """After a pause of its own the listener begins anew: the other side may have had it, too, and wakes later."""

    def __init__(self, now: float) -> None:
        self._since = self._looked = now

    def received(self, now: float) -> None:
        """The other side has spoken."""
        self._since = self._looked = now

    def silent_for(self, now: float) -> float:
        """Seconds of it, at a look that was due SLICE_SECONDS after the last look or word."""
        if now - self._looked > POLL_SECONDS + LATE_SECONDS:
            self._since = now
        self._looked = now
        return now - self._since
