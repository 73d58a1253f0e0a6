"""PURE: how long a peer has been silent, without the time in which this process itself was suspended."""

AGENT_TIMEOUT_SECONDS = 60.0
"""An agent (or coordinator) that sends nothing for so long is lost; a live one sends every few seconds at least."""
STALLED_TIMEOUT_SECONDS = 10.0
"""The same while no rank of the job moves, as when a node has lost the network: its peers wait for it."""
POLL_SECONDS = 2.0
"""How often a listener checks."""
LATE_SECONDS = 3.0
"""A check that is so late means that this process was suspended, or got no CPU time."""


class PeerTimeout:
    """After a pause of its own the listener starts anew: the peer may have been suspended too, and wake up later."""

    def __init__(self, now: float) -> None:
        self._since = self._looked = now

    def received(self, now: float) -> None:
        """The peer has sent something."""
        self._since = self._looked = now

    def silent_for(self, now: float) -> float:
        """Seconds of silence, at a check that was due POLL_SECONDS after the last check or message."""
        if now - self._looked > POLL_SECONDS + LATE_SECONDS:
            self._since = now
        self._looked = now
        return now - self._since
