"""Jobs in a scheduler: their attempts, the settings that a site has changed, and the answers from one pass."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from orchestrator.controller.submission_limits import unresolved_submissions
from orchestrator.errors import ConfigError, OrchError, Precondition, SlurmUnreachable
from orchestrator.registry.records import Attempt, Run, Submission
from orchestrator.run_dirs.job_spec import is_live
from orchestrator.scheduler.interface import PREFIX, UNREADABLE, UNRECORDED, JobSpec, JobStatus, Scheduler, tags
from orchestrator.scheduler.slurm.command_output import epoch
from orchestrator.scheduler.slurm.sbatch_values import minutes
from orchestrator.states import LIVE_ATTEMPTS
from trainer.protocol.run_dir import RunDir

EARLIER, LATER = 60.0, 120.0
"""Seconds by which a job's submit time may precede or follow the start of its sbatch call.

sbatch has a timeout of 60 s, and clocks differ. A job with the same id outside this window is a different job, and
Slurm has lost the first one.
"""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Recorded facts about one attempt's job."""

    run: str
    attempt: int
    nonce: str
    name: str
    run_dir: str = ""  # empty if unknown
    job_id: str | None = None  # of the adopted job
    submit_time: str | None = None  # of the adopted job, as Slurm reported it at adoption
    sluid: str = ""  # of the adopted job; empty: unknown
    submissions: tuple[Submission, ...] = ()
    fresh: str | None = None  # id that sbatch has just returned

    @classmethod
    def from_rows(cls, run: Run, attempt: Attempt, submissions: Iterable[Submission]) -> "JobRecord":
        return cls(
            run=run.name, attempt=attempt.number, nonce=attempt.nonce, name=attempt.job_name, run_dir=run.run_dir,
            job_id=attempt.job_id, submit_time=attempt.submit_time, sluid=attempt.sluid,
            submissions=tuple(submission for submission in submissions if submission.attempt == attempt.number),
        )  # fmt: skip

    @cached_property
    def folder(self) -> str:
        """Submission folder passed to sbatch; "" if the run's folder is unknown."""
        return str(RunDir(Path(self.run_dir)).attempt(self.attempt).submission) if self.run_dir else ""

    @cached_property
    def ids(self) -> frozenset[str]:
        """Ids that Slurm has given this attempt; each may have been reused since."""
        known = {submission.job_id for submission in self.submissions} | {self.job_id, self.fresh}
        return frozenset(job_id for job_id in known if job_id)

    def wanted_ids(self, attempt: Attempt) -> list[str]:
        """Return the ids to poll for the attempt's job: the adopted id, else the ids that sbatch returned."""
        if attempt.state not in LIVE_ATTEMPTS:
            return []
        if attempt.job_id is not None:
            return [attempt.job_id]
        return [submission.job_id for submission in unresolved_submissions(self.submissions) if submission.job_id]


def identify(job: JobStatus, record: JobRecord) -> tuple[bool, str]:
    """Return whether the job was submitted for this attempt, and the evidence.

    A SLUID identifies one run of a job, whose id and tags stay the same when Slurm requeues it, and decides if it is
    known. Our job name, comment and paths are unique to the attempt, so the first match decides, whatever the id. If a
    site has removed all of them, the job's script decides. If that is unreadable, the id and the submit time decide.
    """
    if record.sluid and job.job_id == record.job_id and (job.sluid or job.state == UNREADABLE):
        return job.sluid in ("", record.sluid), f"the adopted id, with SLUID {job.sluid or 'unknown'}"
    for tag in tags(job):
        if tag.nonce:
            ours = (tag.run, tag.attempt, tag.nonce) == (record.run, record.attempt, record.nonce)
            return ours, f"the job names attempt {tag.attempt} of {tag.run}"
        if tag.folder:
            return tag.folder == record.folder, f"its files are in {tag.folder}"
    if job.job_id not in record.ids:
        return False, "none of its tags is ours"
    if job.script_tag is not None:
        return False, "its script is not ours: the id was reused"
    # An id alone proves little, because Slurm reuses ids, but an unreadable job must not count as absent.
    if job.state == UNREADABLE or job.job_id == record.fresh:
        return True, "the id that sbatch printed"
    if job.job_id == record.job_id:
        same = bool(job.submit_time) and job.submit_time == record.submit_time
        return same, f"the adopted id, submitted at {job.submit_time}"
    fits = any(submission.job_id == job.job_id and _fits(job, submission) for submission in record.submissions)
    return fits, f"the id that sbatch printed, submitted at {job.submit_time}"


def _fits(job: JobStatus, submission: Submission) -> bool:
    submitted = epoch(job.submit_time)
    return submitted is not None and -EARLIER <= submitted - submission.submitted_at <= LATER


_SHOWN = 80  # maximum number of characters shown of a foreign name or comment


def changes(job: JobStatus, asked: JobSpec) -> str:
    """Return how Slurm's settings of the job differ from the requested ones; "" if they agree."""
    found = []
    if job.name and job.name != asked.name:
        found.append(f"Slurm renamed the job: {asked.name} -> {job.name[:_SHOWN]}")
    # Accounting may drop comments, and a site may append to them.
    if job.source == "queue" and not job.comment.startswith(asked.comment):
        found.append(f"Slurm changed its comment to {job.comment[:_SHOWN]!r}")
    # A site's defaults for these settings do not count as changes.
    wanted = {
        "requeue": "" if asked.expedite else "0",
        "time limit": asked.resources.time,
        "partition": asked.resources.partition,
    }
    for name, value in (wanted | {"account": asked.resources.account, "qos": asked.resources.qos}).items():
        actual = job.settings.get(name, "")
        if value and actual and not _agrees(name, actual, value):
            found.append(f"Slurm changed its {name}: {value} -> {actual[:_SHOWN]}")
    return "; ".join(found)


def _agrees(name: str, found: str, wanted: str) -> bool:
    if name == "time limit":
        try:
            return minutes(name, found) == minutes(name, wanted)
        except ConfigError:
            return False
    # Slurm picks one of several partitions.
    return set(found.lower().split(",")) <= set(wanted.lower().split(","))


K = TypeVar("K")
V = TypeVar("V")

Records = Mapping[tuple[str, int], JobRecord]  # recorded facts about jobs, by run and attempt number


@dataclass(frozen=True, kw_only=True)
class SchedulerSnapshot:
    """Answers from one pass: `polled` by job id, `found` in the sweep for all jobs with one of our tags.

    `unrecorded`: ids of jobs that have left the queue while accounting does not answer.
    """

    answered: bool
    swept: bool
    polled: dict[str, JobStatus]
    found: tuple[JobStatus, ...] = ()
    unrecorded: frozenset[str] = frozenset()
    error: str = ""
    records: Records = field(default_factory=dict)
    asked: bool = True  # False: this pass does not query the scheduler

    def for_attempt(self, attempt: Attempt) -> "SchedulerSnapshot":
        """Return this snapshot, or an unanswered one if this attempt's own job record is unreadable."""
        for job in self.of_attempt(attempt):
            if job.state == UNREADABLE:
                return replace(
                    UNREACHABLE, error=f"the report on job {job.job_id or job.name} cannot be read: {job.reason}"
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
        by_id = [job for job_id in record.ids for job in self._by_id.get(job_id, ())]
        found = {id(job): job for job in (*named, *by_id)}
        return [job for job in found.values() if identify(job, record)[0]]

    def live(self, attempt: Attempt) -> list[JobStatus]:
        """Return this attempt's jobs that may still run."""
        return [job for job in self.of_attempt(attempt) if is_live(job)]

    def of_run(self, run: Run) -> list[JobStatus]:
        """Return the live jobs of every attempt of this run, including unrecorded attempts.

        A run of the same name in another registry has different nonces and a different folder.
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

    def requeued_job(self, run: Run, attempt: Attempt) -> JobStatus | None:
        """Return the attempt's job if Slurm has ended this run of it and requeued it; its SLUID is then another."""
        for job in self.of_run(run):
            if attempt.sluid and job.job_id == attempt.job_id and job.sluid not in ("", attempt.sluid):
                return job
        return None

    def cancelled_requeue(self, attempt: Attempt) -> JobStatus | None:
        """Return the attempt's job if it was cancelled after Slurm had requeued it, before any attempt adopted it."""
        for job in self._by_id.get(attempt.job_id or "", ()):
            if attempt.sluid and job.sluid not in ("", attempt.sluid) and job.state == "CANCELLED":
                return job if job.restarts > attempt.restarts else None
        return None

    def owner(self, job: JobStatus) -> JobRecord | None:
        """Return the record of the attempt for which the job was submitted; None if no record matches."""
        named = [record for tag in tags(job) if (record := self.records.get((tag.run, tag.attempt))) is not None]
        by_id = (
            [record for record in self.records.values() if job.job_id in record.ids] if job.sluid or not named else []
        )
        return next((record for record in (*named, *by_id) if identify(job, record)[0]), None)

    def record(self, attempt: Attempt) -> JobRecord:
        """Return the recorded facts about this attempt's job."""
        known = self.records.get((attempt.run, attempt.number))
        return known or JobRecord(
            run=attempt.run, attempt=attempt.number, nonce=attempt.nonce, name=attempt.job_name,
            job_id=attempt.job_id, submit_time=attempt.submit_time, sluid=attempt.sluid,
        )  # fmt: skip

    @cached_property
    def _jobs(self) -> tuple[JobStatus, ...]:
        """Each run of a job once; an answer to a poll by id takes precedence over the sweep."""
        earlier = (before for job in self.polled.values() for before in job.earlier)
        swept = (job for job in self.found if not job.job_id or job.job_id not in self.polled)
        return (*self.polled.values(), *earlier, *swept)

    @cached_property
    def _jobs_by_tag(self) -> dict[tuple[str, int], list[JobStatus]]:
        return _group((key, job) for job in self._jobs for key in {(tag.run, tag.attempt) for tag in tags(job)})

    @cached_property
    def _by_id(self) -> dict[str, list[JobStatus]]:
        return _group((job.job_id, job) for job in self._jobs)

    @cached_property
    def _records_by_run(self) -> dict[str, list[JobRecord]]:
        return _group((record.run, record) for record in self.records.values())


def _group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


UNREACHABLE = SchedulerSnapshot(answered=False, swept=False, polled={}, error="no such scheduler here")


def take_snapshot(
    scheduler: Scheduler,
    records: Records,
    wanted: list[str],
    *,
    sweep: Callable[[SchedulerSnapshot], bool],
    between: Callable[[], None] = lambda: None,
) -> SchedulerSnapshot:
    """Poll the ids in `wanted` in one batch. If `sweep` returns True for the answers, call `between` and sweep."""
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
        # The answers by id remain valid.
        return replace(seen, error=_error_text(error)) if polled else replace(UNREACHABLE, error=_error_text(error))


_NO_ANSWER = (SlurmUnreachable, Precondition, OSError, ValueError)
"""Errors that mean "no answer". They carry no evidence about the jobs."""


def _error_text(error: Exception) -> str:
    return error.what if isinstance(error, OrchError) else str(error)
