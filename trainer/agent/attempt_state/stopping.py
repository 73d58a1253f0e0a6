"""Stop requests for an attempt, and its job's deadline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkpointing.save_interval import last_save_before
from trainer.protocol import time_spans
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_progress.progress import StopReason

PRESSING = ("SIGTERM", "SIGINT")
"""Signals soon followed by SIGKILL."""
WARNINGS = ("SIGUSR1", "SIGUSR2")
"""Signals sent before a job ends: orch asks Slurm for USR2; sites, submitit and Lightning use USR1."""

_BEGINS_LATE = 600.0
_LATE_SHARE = 0.05
"""Maximum share of the job's duration that a fast clock may cost."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Time limits for the ranks to agree, save and exit, in seconds."""

    requested: float = 60.0  # after a request or USR2, or after the last progress since then
    longest: float = 1800.0  # after a request or USR2, regardless of progress
    term: float = 20.0  # after SIGTERM: Slurm's KillWait is 30
    margin: float = 5.0  # before the end of the job, for writing the outcome


def parse_time(text: str) -> float | None:
    """Convert a time limit in Slurm's notation to seconds. Return None if it is unlimited."""
    text = text.strip()
    if not text or time_spans.is_no_limit(text):
        return None
    return float(time_spans.seconds(text))


def begins_late(lasts: float) -> float:
    """Return the maximum delay in seconds between job and coordinator start; some sites take minutes to start a job."""
    return min(_BEGINS_LATE, lasts * _LATE_SHARE)


def lead(limit: float | None, configured: float) -> float:
    """Return how many seconds before the end to start stopping: as configured, but at most half of a short job."""
    return configured if limit is None else min(configured, limit / 2)


def classify_signal(signal_name: str, *, kind: str, left: float | None, lead_seconds: float) -> StopReason:
    """Return why an agent received this signal, with `left` seconds until the end of the job (None: no limit)."""
    scheduler = traits(kind)
    if left is not None and left <= lead_seconds + scheduler.signal_early:
        return StopReason.TIME_LIMIT
    if signal_name in WARNINGS or scheduler.preempts:
        return StopReason.PREEMPTION
    # The local scheduler never preempts, so a person ended the job.
    return StopReason.CANCEL


def bound(signal_name: str, reason: StopReason, *, now: float, end: float | None, bounds: Bounds) -> float:
    """Return when the ranks must be done. `end` is the job's end; both are on the same clock as `now`."""
    last = None if end is None else end - bounds.margin
    if signal_name in PRESSING:
        wish = now + bounds.term
    elif reason is StopReason.TIME_LIMIT and last is not None:
        wish = last  # all remaining time
    else:
        wish = now + bounds.requested
    return max(now, wish if last is None else min(wish, last))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A requested stop; ranks that have not saved by `until` are killed."""

    reason: StopReason
    why: str
    until: float
    latest: float  # upper limit of `until`


class Stopping:
    """The end of the job and the first reason to stop; times are on the coordinator's monotonic clock."""

    def __init__(self, *, kind: str, started: float, limit: str, signal_lead: float, bounds: Bounds) -> None:
        seconds = parse_time(limit)
        self._kind, self._bounds = kind, bounds
        self._seen: list[tuple[int, int, int]] = []
        self._lead = lead(seconds, signal_lead)
        self._early = traits(kind).signal_early
        self._started = started
        self._half = None if seconds is None else started + seconds / 2
        self._save = self._step = 0.0
        self.end = None if seconds is None else started + seconds
        self.stop: Stop | None = None

    def correct(self, end: float, lasts: float | None = None) -> float:
        """Set the job's end as reported by the scheduler and converted by this node's time of day. Return the end used.
        `lasts` is the job's duration in seconds on the scheduler's clock. A node's time of day may be off by hours, so
        the result is limited to what a late start of the coordinator could explain.
        """
        if lasts is not None:
            latest = self._started + lasts
            end = min(max(end, latest - begins_late(lasts)), latest)
        self.end = end
        return end

    def on_signal(self, signal_name: str, now: float) -> Stop:
        left = None if self.end is None else self.end - now
        reason = classify_signal(signal_name, kind=self._kind, left=left, lead_seconds=self._lead_now())
        why = f"an agent got {signal_name}"
        why += ": the time limit is near" if reason is StopReason.TIME_LIMIT else ""
        return self._ask(reason, signal_name, why, now)

    def on_request(self, why: str, now: float) -> Stop:
        return self._ask(StopReason.CANCEL, "", why or "a stop request", now)

    def is_due(self, now: float) -> bool:
        at = self.stop_time
        return self.stop is None and at is not None and now >= at

    @property
    def stop_time(self) -> float | None:
        """Return when to ask the ranks to save and stop: early enough for the slowest save seen.
        Return None if no end is known. At least half of a short job remains for training, however long saves take.
        """
        if self.end is None:
            return None
        margin = self._bounds.margin
        last = last_save_before(self.end, save=self._save, step=self._step, slop=self._early, margin=margin)
        at = min(self.end - self._lead, last)
        return at if self._half is None else max(at, min(self._half, self.end - self._lead))

    @property
    def earliest_stop(self) -> float | None:
        """Return the earliest time at which a stop may come; Slurm may send its signal early."""
        at = self.stop_time
        return None if self.end is None or at is None else min(at, self.end - self._lead - self._early)

    def on_deadline(self, now: float) -> Stop:
        return self._ask(StopReason.TIME_LIMIT, "", "the time limit is near", now)

    def is_overdue(self, now: float) -> bool:
        return self.stop is not None and now >= self.stop.until

    def seconds_left(self, now: float) -> float:
        """Return the seconds left for ranks to save and exit; infinity if no stop is requested."""
        return float("inf") if self.stop is None else max(0.0, self.stop.until - now)

    def extend_for_new_ranks(self, now: float) -> None:
        """Extend a pending stop's deadline for newly started ranks, as if the stop were requested now."""
        if self.stop is not None:
            self._put_off(self.stop, now)

    def record_timings(self, reports: Sequence[ProgressReport]) -> None:
        """Record how long saves (99th percentile) and steps took, as measured by rank 0.
        Old values are kept until rank 0 reports new ones.
        """
        self._save = max([report.save_seconds for report in reports], default=0.0) or self._save
        self._step = max([report.step_seconds for report in reports], default=self._step) or self._step

    def watch(self, reports: Sequence[ProgressReport], now: float) -> None:
        """Extend the stop's deadline while reports show progress or a checkpoint write. Called every second."""
        seen = [(report.generation, report.step, report.saved) for report in reports]
        moved = seen != self._seen or any(report.phase == "checkpoint" for report in reports)
        self._seen = seen
        if moved and self.stop is not None:
            self._put_off(self.stop, now)

    def _put_off(self, stop: Stop, now: float) -> None:
        """Give the ranks more time, up to `latest` and the end of the job."""
        until = min(now + self._bounds.requested, stop.latest)
        if self.end is not None:
            until = min(until, self.end - self._bounds.margin)
        self.stop = replace(stop, until=max(stop.until, until))

    def _ask(self, reason: StopReason, signal_name: str, why: str, now: float) -> Stop:
        """Request a stop. The first reason is kept, and later requests can only shorten the deadline."""
        first = self.stop
        until = bound(signal_name, first.reason if first else reason, now=now, end=self.end, bounds=self._bounds)
        if first is None:
            stop = Stop(reason=reason, why=why, until=until, latest=self._latest(reason, until, now))
        else:
            stop = replace(first, until=min(first.until, until))
        self.stop = replace(stop, latest=stop.until) if signal_name in PRESSING else stop
        return self.stop

    def _lead_now(self) -> float:
        at = self.stop_time
        return self._lead if self.end is None or at is None else max(self._lead, self.end - at)

    def _latest(self, reason: StopReason, until: float, now: float) -> float:
        return until if reason is StopReason.TIME_LIMIT else max(until, now + self._bounds.longest)
