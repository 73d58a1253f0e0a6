"""Slurm's estimate of a waiting job's start. It comes with every look-up of the job and needs no further query."""

from typing import Any

from orchestrator.registry.records import Attempt
from orchestrator.scheduler.interface import QUEUED_STATES, JobStatus

SAME_S = 60.0
"""Seconds by which an estimate may move without being recorded again."""
RECORD_EVERY = 240.0
"""Seconds after which an unchanged estimate is recorded again, so that its age shows that it still holds."""


def changed_fields(attempt: Attempt, job: JobStatus, now: float) -> dict[str, Any]:
    """Return the fields of an attempt that its job's look-up changes: the job's state and the expected start."""
    changed = {} if job.state == attempt.job_state else {"job_state": job.state}
    return changed | changed_estimate(attempt, job, now)


def changed_estimate(attempt: Attempt, job: JobStatus, now: float) -> dict[str, Any]:
    """Return the attempt's fields for a new estimate; empty if nothing needs to be recorded.

    A held job has no estimate. Neither does a job that Slurm's backfill has not reached yet.
    """
    known = attempt.expected_start
    if job.held or job.state not in QUEUED_STATES or job.start_time is None or job.start_time <= now:
        return {} if known is None else {"expected_start": None, "expected_at": None}
    still = known is not None and abs(known - job.start_time) <= SAME_S
    if still and now - (attempt.expected_at or 0.0) < RECORD_EVERY:
        return {}
    return {"expected_start": job.start_time, "expected_at": now}
