"""Runs and jobs of this controller, and the removal of orphaned jobs."""

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.controller.jobs.job_identity import JobRecord, identify
from orchestrator.controller.jobs.job_spec import is_live
from orchestrator.controller.jobs.scheduler_snapshot import Records, SchedulerSnapshot
from orchestrator.controller.jobs.submission_limits import ORPHANS_FOR, unresolved
from orchestrator.controller.reconciler.actor import Actor
from orchestrator.errors import NotFound, Precondition, SchedulerChanged, SlurmUnreachable
from orchestrator.registry.records import Attempt, Run, Submission, UserRequest
from orchestrator.registry.store import Store
from orchestrator.scheduler.interface import LEAVING_STATES, UNREADABLE, JobStatus
from orchestrator.scheduler.job_tags import tags
from orchestrator.scheduler.scheduler_instance import Instance, is_known, same_cluster_name
from orchestrator.states import LIVE_ATTEMPTS, LIVE_RUNS
from trainer.contract.config_sections.scheduler_kinds import traits


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Whether a run is this controller's, and why; an empty reason when there is nothing to say of it."""

    holds: bool
    reason: str = ""


def is_ours(run: Run, scheduler: str) -> bool:
    """Whether a controller with the lease for `scheduler` serves this run; the lease for all runs is the empty one."""
    return scheduler in ("", run.scheduler)


def is_addressed_to(run: Run, request: UserRequest, scheduler: str) -> bool:
    """Whether a request is for the controller of `scheduler`: for its run, or one that a person moves there."""
    return is_ours(run, scheduler) or (is_known(scheduler) and request.args.get("here") == scheduler)


def never_submitted(attempts: Sequence[Attempt]) -> bool:
    """Whether no scheduler can have a job of this run: the mark is written before the first submission."""
    return len(attempts) == 1 and attempts[0].submitted_at is None and attempts[0].job_id is None


def claim(run: Run, attempts: Sequence[Attempt], snapshot: SchedulerSnapshot, host: str) -> Claim:
    """Judge a run without a scheduler by what this one answered; only positive evidence counts."""
    if never_submitted(attempts):
        at = _submitted_on(run, host)
        if at == host:
            return Claim(holds=True, reason="no scheduler has a job of it yet")
        why = f"it was submitted on {at} while no scheduler answered; it goes on with the next `orch` command there"
        return Claim(holds=False, reason=f"{why}, or: orch resume {run.name} --here")
    for attempt in attempts:
        for job in (*snapshot.found, *snapshot.polled.values()):
            if job.name == attempt.job_name and _is_evidence(run, job):
                return Claim(holds=True, reason=f"its job {job.job_id} is here")
    why = "it is not known which cluster has its jobs; on that cluster type:"
    return Claim(holds=False, reason=f"{why} orch resume {run.name} --here" if snapshot.swept else "")


def claim_moved(attempts: Sequence[Attempt], snapshot: SchedulerSnapshot) -> Claim:
    """Judge a run of another instance of this ClusterName: its Slurm may have moved here.

    The proof is a job whose name or comment has the run, attempt and nonce.
    """
    ours = {(attempt.run, attempt.number, attempt.nonce) for attempt in attempts}
    for job in (*snapshot.found, *snapshot.polled.values()):
        if job.state != UNREADABLE and any((tag.run, tag.attempt, tag.nonce) in ours for tag in tags(job)):
            return Claim(holds=True, reason=f"its job {job.job_id} is here")
    return Claim(holds=False)


def _submitted_on(run: Run, host: str) -> str:
    return str(run.identity.get("host") or host)


def _is_evidence(run: Run, job: JobStatus) -> bool:
    """Of a local job that its host lost in a reboot nobody can tell which host that was."""
    return job.state != UNREADABLE and not (traits(run.cluster).simulated_nodes and job.state == "NODE_FAIL")


class Domain:
    """The runs of one controller, by the scheduler that its lease is for and the one that commands reach now."""

    def __init__(self, actor: Actor, instance: Instance | None) -> None:
        self._actor, self.instance = actor, instance
        actor.check_scheduler = self.check_scheduler

    @property
    def scheduler(self) -> str:
        return self._actor.lease.scheduler

    def has(self, run: Run) -> bool:
        """Whether the run is known to be ours."""
        return is_ours(run, self.scheduler)

    def live(self) -> list[Run]:
        """Live runs that are ours, or may turn out to be."""
        runs = self._actor.store.runs(LIVE_RUNS)
        return [run for run in runs if self.has(run) or (not run.scheduler and run.cluster in self._actor.schedulers)]

    def looked_for(self) -> list[Run]:
        """Live runs whose jobs may be here: ours, and those of this Slurm if it had another name before."""
        moved = [run for run in self._actor.store.runs(LIVE_RUNS) if same_cluster_name(run.scheduler, self.scheduler)]
        return self.live() + moved

    def _perhaps_ours(self) -> list[Run]:
        """Live runs that may belong to the scheduler which has not said yet which one it is."""
        if not self.scheduler or is_known(self.scheduler):
            return []
        return [run for run in self._actor.store.runs(LIVE_RUNS) if run.cluster in self._actor.schedulers]

    def job_records(self, attempts: Mapping[str, tuple[Attempt, ...]], now: float) -> Records:
        """What is written down about the jobs of these runs, and of our runs with submissions that nobody has found."""
        store, made = self._actor.store, dict[str, list[Submission]]()
        for one in store.submissions(since=now - ORPHANS_FOR):
            made.setdefault(one.run, []).append(one)
        runs = {name: store.run(name) for name in {*attempts, *made}}
        # An id means nothing to another Slurm than the one that gave it.
        orphaned = [name for name, several in made.items() if name not in attempts and unresolved(several)]
        known = {**attempts, **{name: tuple(store.attempts(name)) for name in orphaned if self.has(runs[name])}}
        return {
            (name, attempt.number): JobRecord.of(runs[name], attempt, made.get(name, ()))
            for name, several in known.items()
            for attempt in several
        }

    def count(self) -> int:
        """How many live runs there is a controller here for."""
        return len(self._perhaps_ours() or self.live())

    def unanswered(self) -> dict[str, str]:
        """Kinds of schedulers that have live runs and have not said yet which one they are, with why."""
        return {run.cluster: self.silence(run.cluster) or "it has not said which it is" for run in self._perhaps_ours()}

    def asked(self) -> bool:
        """Whether somebody waits for an answer of this controller."""
        store = self._actor.store
        return any(
            is_addressed_to(store.run(request.run), request, self.scheduler) for request in store.user_requests()
        )

    def expects(self, run: Run, attempts: Sequence[Attempt]) -> bool:
        """Whether this scheduler should know the newest job of a run."""
        host = socket.gethostname()
        return self.has(run) or (not run.scheduler and never_submitted(attempts) and _submitted_on(run, host) == host)

    def owns(self, run: Run, attempts: Sequence[Attempt], snapshot: SchedulerSnapshot) -> Claim:
        """Whether the run is ours by now; one that nobody has yet is taken on by evidence only."""
        if self.has(run):
            return Claim(holds=True)
        if run.scheduler and not snapshot.answered:
            return Claim(holds=False)
        if not is_known(self.scheduler) or not snapshot.answered:
            return Claim(holds=False, reason=f"{run.cluster} does not answer, nothing is assumed: {snapshot.error}")
        known = bool(run.scheduler)
        found = claim_moved(attempts, snapshot) if known else claim(run, attempts, snapshot, socket.gethostname())
        if not found.holds:
            return found
        if not self._actor.store.together(lambda: self._claims(run)):
            return Claim(holds=False)
        before = f" (it belonged to {run.scheduler})" if known else ""
        self._actor.record_action(f"{run.name} belongs to {self.scheduler}: {found.reason}{before}")
        return found

    def _claims(self, run: Run) -> bool:
        """Whether the run is ours from now on; another controller may have cancelled it since this pass began."""
        store = self._actor.store
        if store.run(run.name).state not in LIVE_RUNS:
            return False
        return store.claim_run(run.name, self.scheduler, epoch=self._actor.epoch, before=run.scheduler)

    def check_scheduler(self) -> None:
        """Raise SchedulerChanged when commands reach another scheduler than the one that the lease is for."""
        own, now = self.scheduler, self.instance() if self.instance is not None else ""
        if own and now and now != own:
            raise SchedulerChanged(f"commands reach {now} by now, and this controller has the lease of {own}")

    def silence(self, kind: str) -> str:
        """Why nothing may be asked of this kind of scheduler now; empty when it may."""
        if kind not in self._actor.schedulers:
            return f"{kind} cannot be used on this machine"
        return self.instance.silence if self.instance is not None and not self.instance() else ""


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
