"""Why and by when the attempt is asked to stop: signals, requests, and the job's own end."""

from dataclasses import dataclass, replace

from trainer.agent.deadline import Bounds, bound, lead, parse_time, reason_of
from trainer.contract.progress import StopReason


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A stop that was asked for; `until` is when ranks that have not saved are killed."""

    reason: StopReason
    why: str
    until: float


class Stopping:
    """Keeps the job's end and the first reason to stop; all times are on the coordinator's monotonic clock."""

    def __init__(self, *, kind: str, started: float, limit: str, signal_lead: float, bounds: Bounds) -> None:
        seconds = parse_time(limit)
        self._kind, self._bounds = kind, bounds
        self._lead = lead(seconds, signal_lead)
        self.end = None if seconds is None else started + seconds
        self.stop: Stop | None = None

    def correct(self, end: float) -> None:
        """The scheduler's word on when the job ends."""
        self.end = end

    def heard(self, signal_name: str, now: float) -> Stop:
        """An agent got a signal."""
        left = None if self.end is None else self.end - now
        reason = reason_of(signal_name, kind=self._kind, left=left, lead_seconds=self._lead)
        return self._ask(reason, signal_name, f"an agent got {signal_name}", now)

    def asked(self, why: str, now: float) -> Stop:
        """Somebody put a stop request into the run directory."""
        return self._ask(StopReason.CANCEL, "", why or "a stop request", now)

    def due(self, now: float) -> bool:
        """Whether the end of the job is so near that it is time to stop."""
        return self.stop is None and self.end is not None and now >= self.end - self._lead

    def ending(self, now: float) -> Stop:
        """The end of the job is near."""
        return self._ask(StopReason.TIME_LIMIT, "", "the time limit is near", now)

    def overdue(self, now: float) -> bool:
        return self.stop is not None and now >= self.stop.until

    def _ask(self, reason: StopReason, signal_name: str, why: str, now: float) -> Stop:
        """The first reason stays; a later one can only shorten the time."""
        first = self.stop
        until = bound(signal_name, first.reason if first else reason, now=now, end=self.end, bounds=self._bounds)
        if first is None:
            self.stop = Stop(reason=reason, why=why, until=until)
        else:
            self.stop = replace(first, until=min(first.until, until))
        return self.stop
