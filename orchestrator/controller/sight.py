"""What one scheduler answered in this tick; no answer is kept apart from an empty one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from orchestrator.controller.jobs import PREFIX, is_live, is_same, parse_name
from orchestrator.errors import OrchError, Precondition, SlurmUnreachable
from orchestrator.registry.records import Attempt
from orchestrator.scheduler.base import UNREADABLE, JobStatus, Scheduler


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Answers of one tick: `polled` by job id, `found` by the sweep over all our job names."""

    answered: bool
    swept: bool
    polled: dict[str, JobStatus]
    found: tuple[JobStatus, ...] = ()
    error: str = ""

    def of(self, attempt: Attempt) -> "Sight":
        """What was answered as far as this attempt goes: nothing, when just its job's record cannot be read."""
        for job in (*self.found, *self.polled.values()):
            if job.state == UNREADABLE and job.name == attempt.job_name:
                return replace(BLIND, error=f"the record of job {job.name} cannot be read: {job.reason}")
        return self

    def job_of(self, attempt: Attempt) -> JobStatus | None:
        """The attempt's own job, or None when the answers do not know it."""
        seen = self.polled.get(attempt.job_id or "")
        if seen is not None and is_same(seen, attempt):
            return seen
        return next((job for job in self.found if is_same(job, attempt)), None)

    def named(self, job_name: str) -> list[JobStatus]:
        """Live jobs of exactly this name, adopted or not."""
        return [job for job in self.found if job.name == job_name and is_live(job)]

    def of_run(self, run: str) -> list[JobStatus]:
        """Live jobs of any attempt of this run."""
        live = [job for job in self.found if is_live(job) and job.state != UNREADABLE]
        return [job for job in live if (name := parse_name(job.name)) and name.run == run]


BLIND = Sight(answered=False, swept=False, polled={}, error="no such scheduler here")


def look(
    scheduler: Scheduler, attempts: Iterable[Attempt], *, sweep: bool, between: Callable[[], None] = lambda: None
) -> Sight:
    """One batched poll for the adopted jobs; `between`, and the sweep, when asked for or when a job is missing."""
    adopted = [attempt for attempt in attempts if attempt.job_id is not None]
    try:
        polled = scheduler.poll(sorted({attempt.job_id for attempt in adopted if attempt.job_id})) if adopted else {}
        seen = Sight(answered=True, swept=False, polled=polled)
        if not sweep and all(seen.job_of(attempt) is not None for attempt in adopted):
            return seen
        between()
        return Sight(answered=True, swept=True, polled=polled, found=tuple(scheduler.find(PREFIX)))
    except (SlurmUnreachable, Precondition, OSError, ValueError) as error:
        # Whatever kept the answer away says nothing about the jobs, nor about those of another kind.
        said = error.what if isinstance(error, OrchError) else str(error)
        return replace(BLIND, error=said)
