"""Identity of Slurm jobs: the attempt of a job, and settings that a site has changed. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestrator.controller.jobs.submission_limits import unresolved_submissions
from orchestrator.errors import ConfigError
from orchestrator.registry.records import Attempt, Run, Submission
from orchestrator.scheduler.interface import UNREADABLE, JobSpec, JobStatus, tags
from orchestrator.scheduler.slurm.command_output import epoch
from orchestrator.scheduler.slurm.sbatch_values import minutes
from orchestrator.states import LIVE_ATTEMPTS
from trainer.protocol.run_dir import RunDir

EARLIER, LATER = 60.0, 120.0
"""Seconds by which a job's submit time may precede or follow the start of its sbatch.

sbatch has a timeout of 60 s, and clocks differ. A job with the same id outside this window reuses the id of a job that
Slurm has lost.
"""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Recorded facts about the job of one attempt."""

    run: str
    attempt: int
    nonce: str
    name: str
    run_dir: str = ""  # empty if unknown
    job_id: str | None = None  # of the adopted job
    submit_time: str | None = None  # of the adopted job, as Slurm reported it then
    submissions: tuple[Submission, ...] = ()
    fresh: str | None = None  # id that sbatch returned just now

    @classmethod
    def from_rows(cls, run: Run, attempt: Attempt, submissions: Iterable[Submission]) -> "JobRecord":
        return cls(
            run=run.name, attempt=attempt.number, nonce=attempt.nonce, name=attempt.job_name, run_dir=run.run_dir,
            job_id=attempt.job_id, submit_time=attempt.submit_time,
            submissions=tuple(one for one in submissions if one.attempt == attempt.number),
        )  # fmt: skip

    @cached_property
    def folder(self) -> str:
        """Submission folder passed to sbatch; "" if the run's folder is unknown."""
        return str(RunDir(Path(self.run_dir)).attempt(self.attempt).submission) if self.run_dir else ""

    @cached_property
    def ids(self) -> frozenset[str]:
        """Ids that Slurm has given this attempt; each may have been reused since."""
        told = {one.job_id for one in self.submissions} | {self.job_id, self.fresh}
        return frozenset(job_id for job_id in told if job_id)

    def wanted_ids(self, attempt: Attempt) -> list[str]:
        """Return the ids to poll for the attempt's job: the adopted id, else the ids that sbatch returned."""
        if attempt.state not in LIVE_ATTEMPTS:
            return []
        if attempt.job_id is not None:
            return [attempt.job_id]
        return [one.job_id for one in unresolved_submissions(self.submissions) if one.job_id]


def identify(job: JobStatus, record: JobRecord) -> tuple[bool, str]:
    """Return whether the job was submitted for this attempt, and the evidence.

    A name, comment or path of ours is as unique as the attempt and survives longest, so the first match decides,
    whatever the id. If a site has removed all of them, the job's script decides; if that is unreadable, the id with the
    submit time decides.
    """
    for tag in tags(job):
        if tag.nonce:
            ours = (tag.run, tag.attempt, tag.nonce) == (record.run, record.attempt, record.nonce)
            return ours, f"the job names attempt {tag.attempt} of {tag.run}"
        if tag.folder:
            return tag.folder == record.folder, f"its files lie in {tag.folder}"
    if job.job_id not in record.ids:
        return False, "nothing of it is ours"
    if job.script_tag is not None:
        return False, "its script is not ours: the id was given out again"
    # An id alone proves little over time, but an unreadable job must not count as absent.
    if job.state == UNREADABLE or job.job_id == record.fresh:
        return True, "the id that sbatch gave"
    if job.job_id == record.job_id:
        same = bool(job.submit_time) and job.submit_time == record.submit_time
        return same, f"the adopted id, submitted at {job.submit_time}"
    fits = any(one.job_id == job.job_id and _fits(job, one) for one in record.submissions)
    return fits, f"the id that sbatch gave, submitted at {job.submit_time}"


def _fits(job: JobStatus, submission: Submission) -> bool:
    submitted = epoch(job.submit_time)
    return submitted is not None and -EARLIER <= submitted - submission.submitted_at <= LATER


_SHOWN = 80
"""Maximum characters shown of a foreign name or comment."""


def changes(job: JobStatus, asked: JobSpec) -> str:
    """Return how Slurm's settings of the job differ from the requested ones; "" if they agree."""
    return "; ".join(_changes(job, asked))


def _changes(job: JobStatus, asked: JobSpec) -> Iterator[str]:
    if job.name and job.name != asked.name:
        yield f"Slurm renamed the job: {asked.name} -> {job.name[:_SHOWN]}"
    # Accounting may drop comments. Older jobs of ours have a shorter comment, and a site may append words.
    same = job.comment.startswith(asked.comment) or (job.comment and asked.comment.startswith(job.comment))
    if job.source == "queue" and not same:
        yield f"Slurm changed its comment to {job.comment[:_SHOWN]!r}"
    for name, wanted in _required_settings(asked):
        found = job.settings.get(name, "")
        if found and not _agrees(name, found, wanted):
            yield f"Slurm changed its {name}: {wanted} -> {found[:_SHOWN]}"


def _required_settings(asked: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the settings for which a site default does not count."""
    of = asked.resources
    yield "requeue", "0"
    settings = (("time limit", of.time), ("partition", of.partition), ("account", of.account), ("qos", of.qos))
    yield from ((name, value) for name, value in settings if value)


def _agrees(name: str, found: str, wanted: str) -> bool:
    if name == "time limit":
        try:
            return minutes(name, found) == minutes(name, wanted)
        except ConfigError:
            return False
    # Slurm picks one of several partitions.
    return set(found.lower().split(",")) <= set(wanted.lower().split(","))
