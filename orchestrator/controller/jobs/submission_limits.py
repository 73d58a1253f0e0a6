"""How often a job may be submitted while nobody can find it: pure decisions with their reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.registry.records import Submission
from trainer.contract.time_spans import stored_moment

MOST_FOR_ATTEMPT = 3
"""Submissions of one attempt of which no job can be found; after that a person must look."""
MOST_IN_AN_HOUR = 20
"""The same over all runs of the registry, in `HOUR`. Jobs that were found do not count: they are what was asked for."""
HOUR = 3600.0
ORPHANS_FOR = 7 * 86400.0
"""Seconds for which the job of a submission that was never found is looked for by its id."""

ADOPTED, REFUSED, CANCELLED = "adopted", "refused", "cancelled"
"""What became of a submission."""


class SubmitStep(StrEnum):
    SUBMIT = "submit"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class Permission:
    """Whether a job that cannot be found may be submitted now, and why (not)."""

    step: SubmitStep
    reason: str = ""


def unresolved(submissions: Iterable[Submission]) -> list[Submission]:
    """Submissions of which nobody knows what became of them."""
    return [one for one in submissions if not one.outcome]


def submit_permission(attempt: Sequence[Submission], everyone: Sequence[Submission], now: float) -> Permission:
    """Whether the job of an attempt may be submitted, when it is certain that none of it can be found.

    `attempt`: its own submissions so far; `everyone`: those of all runs within the last HOUR.
    """
    lost = unresolved(attempt)
    # A site that changes jobs so that they are not found again would be filled with them.
    if len(lost) >= MOST_FOR_ATTEMPT:
        return Permission(step=SubmitStep.GIVE_UP, reason=_given_up(lost))
    recent = sorted(one.submitted_at for one in unresolved(everyone) if one.submitted_at > now - HOUR)
    if len(recent) >= MOST_IN_AN_HOUR:
        until = stored_moment(recent[len(recent) - MOST_IN_AN_HOUR] + HOUR)
        said = f"{len(recent)} jobs that were submitted within the last hour cannot be found in Slurm"
        return Permission(step=SubmitStep.WAIT, reason=f"waits until {until}: {said}; `squeue --me` shows what it has")
    return Permission(step=SubmitStep.SUBMIT)


def _given_up(lost: Sequence[Submission]) -> str:
    ids = [one.job_id for one in lost if one.job_id]
    times = ", ".join(stored_moment(one.submitted_at) for one in lost)
    seen = f"sbatch gave the job ids {', '.join(ids)}" if ids else "sbatch gave no job id"
    look = f"`scontrol show job {ids[-1]}`" if ids else "`squeue --me`"
    end = f"end what is left of it with `scancel {' '.join(ids)}`" if ids else "end what is left of it with scancel"
    return (
        f"the job was submitted {len(lost)} times ({times}) and cannot be found in Slurm; {seen}. "
        f"See with {look} whether the site changes jobs, and {end}"
    )
