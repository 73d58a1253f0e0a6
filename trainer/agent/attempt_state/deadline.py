"""PURE: when the job ends, why it is asked to stop, and by when its ranks must have saved."""

from dataclasses import dataclass

from trainer.contract import slurm_time
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.ranks.progress import StopReason

PRESSING = ("SIGTERM", "SIGINT")
"""Signals that SIGKILL follows soon."""
WARNINGS = ("SIGUSR1", "SIGUSR2")
"""Signals before the end of a job: orch asks Slurm for USR2; sites, submitit and Lightning are used to USR1."""


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
    if not text or slurm_time.is_no_limit(text):
        return None
    return float(slurm_time.seconds(text))


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
