"""Stop requests of an attempt and the deadline of its job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkpointing.save_interval import last_save_before
from trainer.contract import time_spans
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.messages.agents import ProgressReport
from trainer.contract.ranks.progress import StopReason

PRESSING = ("SIGTERM", "SIGINT")
"""Signals that SIGKILL follows soon."""
WARNINGS = ("SIGUSR1", "SIGUSR2")
"""Signals before the end of a job: orch asks Slurm for USR2; sites, submitit and Lightning are used to USR1."""

_BEGINS_LATE = 600.0
_LATE_SHARE = 0.05
"""Of the job: a clock that is ahead costs no more of it."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Seconds that ranks get to agree, save and exit."""

    asked: float = 60.0  # after a request or USR2, or after the last progress since then
    longest: float = 1800.0  # after a request or USR2, whatever progress there is
    term: float = 20.0  # after SIGTERM: Slurm's KillWait is 30
    margin: float = 5.0  # to the end of the job, for writing the outcome


def parse_time(text: str) -> float | None:
    """Seconds of a limit in Slurm's notation; None when there is none."""
    text = text.strip()
    if not text or time_spans.is_no_limit(text):
        return None
    return float(time_spans.seconds(text))


def begins_late(lasts: float) -> float:
    """Seconds by which a coordinator begins after its job, at most: some sites take minutes to start one."""
    return min(_BEGINS_LATE, lasts * _LATE_SHARE)


def lead(limit: float | None, asked: float) -> float:
    """Seconds before the end at which an attempt begins to stop: as configured, but never most of a short job."""
    return asked if limit is None else min(asked, limit / 2)


def reason_of(signal_name: str, *, kind: str, left: float | None, lead_seconds: float) -> StopReason:
    """Why an agent got this signal, with `left` seconds until the end of the job (None: no limit)."""
    scheduler = traits(kind)
    if left is not None and left <= lead_seconds + scheduler.signal_early:
        return StopReason.TIME_LIMIT
    if signal_name in WARNINGS or scheduler.preempts:
        return StopReason.PREEMPTION
    # Nothing preempts a job on this machine: a person ends it.
    return StopReason.CANCEL


def bound(signal_name: str, reason: StopReason, *, now: float, end: float | None, bounds: Bounds) -> float:
    """By when, on the clock of `now`, ranks must be done; `end` is the job's end on the same clock."""
    last = None if end is None else end - bounds.margin
    if signal_name in PRESSING:
        wish = now + bounds.term
    elif reason is StopReason.TIME_LIMIT and last is not None:
        wish = last  # all the time there is
    else:
        wish = now + bounds.asked
    return max(now, wish if last is None else min(wish, last))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A requested stop; `until` is when ranks that have not saved are killed."""

    reason: StopReason
    why: str
    until: float
    latest: float  # `until` is never moved beyond this


class Stopping:
    """The end of the job and the first reason to stop; all times are on the coordinator's monotonic clock."""

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
        """Note the scheduler's end of the job, as this node's time of day places it; returns the end that counts.

        `lasts`: seconds from the job's start to its end, both on the scheduler's clock. A node's time of day may be
        hours off, so it counts only as far as the coordinator can have begun after its job.
        """
        if lasts is not None:
            latest = self._started + lasts
            end = min(max(end, latest - begins_late(lasts)), latest)
        self.end = end
        return end

    def heard(self, signal_name: str, now: float) -> Stop:
        """An agent got a signal."""
        left = None if self.end is None else self.end - now
        reason = reason_of(signal_name, kind=self._kind, left=left, lead_seconds=self._lead_now())
        why = f"an agent got {signal_name}"
        why += ": the time limit is near" if reason is StopReason.TIME_LIMIT else ""
        return self._ask(reason, signal_name, why, now)

    def asked(self, why: str, now: float) -> Stop:
        """There is a stop request in the run directory."""
        return self._ask(StopReason.CANCEL, "", why or "a stop request", now)

    def due(self, now: float) -> bool:
        """Whether the end of the job is so near that it is time to stop."""
        at = self.stop_at
        return self.stop is None and at is not None and now >= at

    @property
    def stop_at(self) -> float | None:
        """When the ranks will be asked to save and stop: early enough for the slowest save seen; None: no end is known.

        Never most of a short job, whatever saves take.
        """
        if self.end is None:
            return None
        margin = self._bounds.margin
        last = last_save_before(self.end, save=self._save, step=self._step, slop=self._early, margin=margin)
        at = min(self.end - self._lead, last)
        return at if self._half is None else max(at, min(self._half, self.end - self._lead))

    @property
    def expected_at(self) -> float | None:
        """When a stop may come at the earliest: Slurm's signal can be early."""
        return (
            None if self.end is None or self.stop_at is None else min(self.stop_at, self.end - self._lead - self._early)
        )

    def ending(self, now: float) -> Stop:
        """The end of the job is near."""
        return self._ask(StopReason.TIME_LIMIT, "", "the time limit is near", now)

    def overdue(self, now: float) -> bool:
        return self.stop is not None and now >= self.stop.until

    def left(self, now: float) -> float:
        """Seconds that ranks still have to save and exit; infinity while no stop is requested."""
        return float("inf") if self.stop is None else max(0.0, self.stop.until - now)

    def again(self, now: float) -> None:
        """New ranks are asked to stop: they get as much time as if the stop were requested now."""
        if self.stop is not None:
            self._put_off(self.stop, now)

    def learned(self, reports: Sequence[ProgressReport]) -> None:
        """How long saves (the 99th percentile) and steps take, as rank 0 has measured it; until it has, as before."""
        self._save = max([report.save_seconds for report in reports], default=0.0) or self._save
        self._step = max([report.step_seconds for report in reports], default=self._step) or self._step

    def watch(self, reports: Sequence[ProgressReport], now: float) -> None:
        """Once a second, the nodes' newest reports: ranks that train on or write a checkpoint get more time."""
        seen = [(report.generation, report.step, report.saved) for report in reports]
        moved = seen != self._seen or any(report.phase == "checkpoint" for report in reports)
        self._seen = seen
        if moved and self.stop is not None:
            self._put_off(self.stop, now)

    def _put_off(self, stop: Stop, now: float) -> None:
        """Give the ranks as much time again, up to `latest` and the end of the job."""
        until = min(now + self._bounds.asked, stop.latest)
        if self.end is not None:
            until = min(until, self.end - self._bounds.margin)
        self.stop = replace(stop, until=max(stop.until, until))

    def _ask(self, reason: StopReason, signal_name: str, why: str, now: float) -> Stop:
        """The first reason stays; a later one can only shorten the time."""
        first = self.stop
        until = bound(signal_name, first.reason if first else reason, now=now, end=self.end, bounds=self._bounds)
        if first is None:
            stop = Stop(reason=reason, why=why, until=until, latest=self._latest(reason, until, now))
        else:
            stop = replace(first, until=min(first.until, until))
        self.stop = replace(stop, latest=stop.until) if signal_name in PRESSING else stop
        return self.stop

    def _lead_now(self) -> float:
        at = self.stop_at
        return self._lead if self.end is None or at is None else max(self._lead, self.end - at)

    def _latest(self, reason: StopReason, until: float, now: float) -> float:
        return until if reason is StopReason.TIME_LIMIT else max(until, now + self._bounds.longest)
