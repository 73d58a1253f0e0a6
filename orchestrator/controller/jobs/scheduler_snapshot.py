"""Answers of one scheduler within a pass; a missing answer is distinct from an empty one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from orchestrator.controller.jobs.job_identity import JobRecord, identify
from orchestrator.errors import OrchError, Precondition, SlurmUnreachable
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs.job_spec import is_live
from orchestrator.scheduler.interface import PREFIX, UNREADABLE, UNRECORDED, JobStatus, Scheduler, tags

Records = Mapping[tuple[str, int], JobRecord]
"""Recorded facts about jobs, by run and attempt number."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSnapshot:
    """Answers within one pass: `polled` by job id, `found` by the sweep over all jobs with a mark of ours.

    `unrecorded`: ids that have left the queue while accounting does not answer.
    """

    answered: bool
    swept: bool
    polled: dict[str, JobStatus]
    found: tuple[JobStatus, ...] = ()
    unrecorded: frozenset[str] = frozenset()
    error: str = ""
    records: Records = field(default_factory=dict)

    def for_attempt(self, attempt: Attempt) -> "SchedulerSnapshot":
        """Return this snapshot, or an unanswered one if this attempt's own job record is unreadable."""
        for job in self.of_attempt(attempt):
            if job.state == UNREADABLE:
                return replace(
                    UNREACHABLE, error=f"what is said of job {job.job_id or job.name} cannot be read: {job.reason}"
                )
        return self

    def adopted_job(self, attempt: Attempt) -> JobStatus | None:
        """Return the attempt's adopted job, or None if the answers do not include it."""
        return next((job for job in self.of_attempt(attempt) if job.job_id == attempt.job_id), None)

    def of_attempt(self, attempt: Attempt) -> list[JobStatus]:
        """Return every job submitted for this attempt, adopted or not, in any state."""
        return self.of_record(self.record(attempt))

    def of_record(self, record: JobRecord) -> list[JobStatus]:
        """Return every job that this record identifies."""
        named = self._jobs_by_tag.get((record.run, record.attempt), [])
        found = {id(job): job for job in (*named, *self._with_ids(record.ids))}
        return [job for job in found.values() if identify(job, record)[0]]

    def live(self, attempt: Attempt) -> list[JobStatus]:
        """Return this attempt's jobs that may still run."""
        return [job for job in self.of_attempt(attempt) if is_live(job)]

    def of_run(self, run: Run) -> list[JobStatus]:
        """Return live jobs of any attempt of this run, unrecorded attempts included.

        A run of the same name in another registry has other nonces and another folder.
        """
        records = self._records_by_run.get(run.name, [])
        nonces = {record.nonce for record in records}
        named = (job for (name, _), jobs in self._jobs_by_tag.items() if name == run.name for job in jobs)
        found = {
            id(job): job
            for job in named
            if any(tag.nonce in nonces or tag.folder.startswith(f"{run.run_dir}/") for tag in tags(job))
        }
        for record in records:
            found |= {id(job): job for job in self.of_record(record)}
        return [job for job in found.values() if is_live(job) and job.state != UNREADABLE]

    def owner(self, job: JobStatus) -> JobRecord | None:
        """Return the record of the attempt that the job was submitted for, among the recorded ones."""
        named = [record for tag in tags(job) if (record := self.records.get((tag.run, tag.attempt))) is not None]
        by_id = [record for record in self.records.values() if job.job_id in record.ids] if not named else []
        return next((record for record in (*named, *by_id) if identify(job, record)[0]), None)

    def record(self, attempt: Attempt) -> JobRecord:
        """Return the recorded facts about this attempt's job."""
        known = self.records.get((attempt.run, attempt.number))
        return known or JobRecord(
            run=attempt.run, attempt=attempt.number, nonce=attempt.nonce, name=attempt.job_name,
            job_id=attempt.job_id, submit_time=attempt.submit_time,
        )  # fmt: skip

    @cached_property
    def _jobs(self) -> tuple[JobStatus, ...]:
        """Each job once; an answer to a poll by id takes precedence over the sweep."""
        return (
            *self.polled.values(),
            *(job for job in self.found if not job.job_id or job.job_id not in self.polled),
        )

    @cached_property
    def _jobs_by_tag(self) -> dict[tuple[str, int], list[JobStatus]]:
        found: dict[tuple[str, int], list[JobStatus]] = {}
        for job in self._jobs:
            for key in {(tag.run, tag.attempt) for tag in tags(job)}:
                found.setdefault(key, []).append(job)
        return found

    @cached_property
    def _by_id(self) -> dict[str, list[JobStatus]]:
        found: dict[str, list[JobStatus]] = {}
        for job in self._jobs:
            found.setdefault(job.job_id, []).append(job)
        return found

    @cached_property
    def _records_by_run(self) -> dict[str, list[JobRecord]]:
        found: dict[str, list[JobRecord]] = {}
        for record in self.records.values():
            found.setdefault(record.run, []).append(record)
        return found

    def _with_ids(self, ids: Iterable[str]) -> list[JobStatus]:
        return [job for job_id in ids for job in self._by_id.get(job_id, ())]


UNREACHABLE = SchedulerSnapshot(answered=False, swept=False, polled={}, error="no such scheduler here")


def take_snapshot(
    scheduler: Scheduler,
    records: Records,
    wanted: list[str],
    *,
    sweep: Callable[[SchedulerSnapshot], bool],
    between: Callable[[], None] = lambda: None,
) -> SchedulerSnapshot:
    """Poll the ids in `wanted` in one batch; if `sweep` requests it for that answer, call `between` and sweep."""
    try:
        answers = scheduler.poll(sorted(set(wanted))) if wanted else {}
    except _NO_ANSWER as error:
        return replace(UNREACHABLE, error=_error_text(error))
    polled = {job_id: job for job_id, job in answers.items() if job.state != UNRECORDED}
    unrecorded = frozenset(answers) - frozenset(polled)
    seen = SchedulerSnapshot(answered=True, swept=False, polled=polled, records=records, unrecorded=unrecorded)
    if not sweep(seen):
        return seen
    between()
    try:
        known = frozenset(job_id for record in records.values() for job_id in record.ids)
        return replace(seen, swept=True, found=tuple(scheduler.find(PREFIX, known)))
    except _NO_ANSWER as error:
        # The jobs polled by id are known regardless.
        return replace(seen, error=_error_text(error)) if polled else replace(UNREACHABLE, error=_error_text(error))


_NO_ANSWER = (SlurmUnreachable, Precondition, OSError, ValueError)
"""Errors that mean "no answer". They carry no evidence about the jobs."""


def _error_text(error: Exception) -> str:
    return error.what if isinstance(error, OrchError) else str(error)
