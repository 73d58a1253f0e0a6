"""What orch does to a job that lives: its release, its true deadline, its end, written down before it comes."""

from collections.abc import Iterator
from contextlib import contextmanager

from checkpointing.storage.storage_errors import is_disk_error
from orchestrator.controller.reconciler.actor import Actor
from orchestrator.controller.run_dirs.collect_evidence import REQUEUED, SILENCED
from orchestrator.controller.run_view import RunView
from orchestrator.recovery.evidence import Evidence
from orchestrator.recovery.silent_coordinator import Escalation, judge_silence
from orchestrator.scheduler.interface import LEAVING_STATES, QUEUED_STATES, RUNNING_STATES, JobStatus
from orchestrator.states import AttemptState
from trainer.contract.requests import RequestKind


def end_job(actor: Actor, view: RunView, job_id: str, reason: str, detail: str = SILENCED) -> None:
    """Cancel a job of the newest attempt; the request is the intent, or the end would look like a person's scancel."""
    actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, detail)
    actor.cancel(view.run, job_id, reason)


def end_judged_job(actor: Actor, view: RunView, job_id: str, reason: str) -> None:
    """Cancel a job whose end is judged already: a disk that is too full for the intent makes no difference."""
    with ignored_disk_errors():
        actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, SILENCED)
    actor.cancel(view.run, job_id, reason)


@contextmanager
def ignored_disk_errors() -> Iterator[None]:
    """Go on where a disk that is full, or broken, has kept a request from being written."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise


SAVED_WITHIN = 30.0
"""Seconds after which slurmctld has saved that a job was released: it does so every 5 s, and a crash loses no more."""


def is_held_by_somebody(actor: Actor, view: RunView, job: JobStatus) -> bool:
    """Whether a person holds a job that was released; a release that Slurm has lost looks alike, but is younger."""
    key = f"unheld:{view.run.name}/{view.last.number}"
    if not job.held:
        actor.observed.age(key, job.job_id)
        return False
    return actor.observed.value(key) == job.job_id and actor.observed.age(key, job.job_id) >= SAVED_WITHIN


def maintain_job(actor: Actor, view: RunView, job: JobStatus) -> None:
    """What a live job needs: its release, its true deadline, or its end when Slurm has started it again."""
    # A slurmctld that lost its newest state has a running job queued again, and counts no restart.
    forgotten = view.last.state is AttemptState.RUNNING and job.state in QUEUED_STATES
    if (job.restarts > 0 or forgotten) and job.state not in LEAVING_STATES:
        end_job(actor, view, job.job_id, "requeued by Slurm: it must not train again", REQUEUED)
    elif job.held and view.cancel is None and not is_held_by_somebody(actor, view, job):
        actor.release(view.run, view.last, view.folder, view.config)
    elif job.state in RUNNING_STATES and job.end_time is not None:
        with ignored_disk_errors():  # its agents know the configured limit
            actor.request_once(
                view.folder, RequestKind.DEADLINE, view.last.number, "the job's end by Slurm's clock", job.end_time
            )


def end_silent_job(actor: Actor, view: RunView, job: JobStatus, evidence: Evidence) -> None:
    """A job whose coordinator is silent for long is asked to stop, then cancelled: it would idle to its limit."""
    silence = judge_silence(evidence, view.config.detection.hang.heartbeat)
    if silence.step is Escalation.REQUEST_STOP:
        # It proves that the directory can be written from here, too.
        actor.request_once(view.folder, RequestKind.STOP, view.last.number, silence.reason, None, SILENCED)
    elif silence.step is Escalation.CANCEL:
        end_job(actor, view, job.job_id, silence.reason)
