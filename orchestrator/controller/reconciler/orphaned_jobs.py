"""Jobs that should not be: of attempts that are over, and late duplicates; jobs of other registries are not ours."""

import logging

from orchestrator.controller.jobs.job_identity import JobRecord, identify
from orchestrator.controller.jobs.job_spec import is_live
from orchestrator.controller.jobs.scheduler_snapshot import SchedulerSnapshot
from orchestrator.controller.reconciler.actor import Actor
from orchestrator.controller.reconciler.ownership import Domain
from orchestrator.errors import NotFound, Precondition, SlurmUnreachable
from orchestrator.registry.store import Store
from orchestrator.scheduler.interface import LEAVING_STATES, UNREADABLE, JobStatus
from orchestrator.scheduler.job_tags import tags
from orchestrator.states import LIVE_ATTEMPTS

log = logging.getLogger("orch.controller")


def sweep_orphans(actor: Actor, domain: Domain, kind: str, snapshot: SchedulerSnapshot) -> None:
    """Cancel what a sweep has found of them; one that cannot be cancelled now is found again."""
    for job in snapshot.found:
        if is_live(job) and job.state not in LEAVING_STATES and job.state != UNREADABLE:
            try:
                _sweep_job(actor, domain, job, snapshot)
            except (SlurmUnreachable, Precondition, OSError, ValueError) as error:
                log.warning("%s: %s", kind, error)


def _sweep_job(actor: Actor, domain: Domain, job: JobStatus, snapshot: SchedulerSnapshot) -> None:
    owner = snapshot.owner(job) or _recorded_owner(actor.store, job)
    if owner is None:
        return
    run, attempt = actor.store.run(owner.run), actor.store.attempt(owner.run, owner.attempt)
    if not domain.has(run):
        return
    if attempt.state not in LIVE_ATTEMPTS:
        actor.cancel_orphan(run, owner, job.job_id, f"its attempt {attempt.number} is {attempt.state}")
    elif attempt.job_id is not None and attempt.job_id != job.job_id:
        actor.cancel_orphan(run, owner, job.job_id, f"a late duplicate of {attempt.job_id}")


def _recorded_owner(store: Store, job: JobStatus) -> JobRecord | None:
    """The attempt of a run that is over, by what the job itself says."""
    for tag in tags(job):
        try:
            run, attempt = store.run(tag.run), store.attempt(tag.run, tag.attempt)
        except NotFound:
            continue
        record = JobRecord.of(run, attempt, ())
        if run.name == tag.run and identify(job, record)[0]:
            return record
    return None
