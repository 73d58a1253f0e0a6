"""This controller's runs and jobs, and the cancellation of orphaned jobs."""

import logging
import socket
from collections.abc import Mapping, Sequence

from orchestrator.controller.actor import Actor
from orchestrator.controller.scheduler_snapshot import JobRecord, Records, SchedulerSnapshot, identify
from orchestrator.controller.submission_limits import ORPHANS_FOR, unresolved_submissions
from orchestrator.errors import NotFound, Precondition, SchedulerChanged, SlurmUnreachable
from orchestrator.registry.records import Attempt, Run, Submission, UserRequest
from orchestrator.registry.store import Store
from orchestrator.run_dirs.job_spec import is_live
from orchestrator.scheduler.interface import LEAVING_STATES, UNREADABLE, JobStatus, tags
from orchestrator.scheduler.scheduler_instance import Instance, is_known, same_cluster_name
from orchestrator.states import LIVE_ATTEMPTS, LIVE_RUNS
from trainer.protocol.config_sections.scheduler_kinds import traits

Claim = tuple[bool, str]  # whether a run belongs to this controller, and why; the reason may be empty


def is_ours(run: Run, scheduler: str) -> bool:
    """Return whether the lease for `scheduler` covers this run; the lease for all runs has an empty name."""
    return scheduler in ("", run.scheduler)


def is_addressed_to(run: Run, request: UserRequest, scheduler: str) -> bool:
    """Return whether a request concerns a run of `scheduler`, or a run that the user is moving to it."""
    return is_ours(run, scheduler) or (is_known(scheduler) and request.args.get("here") == scheduler)


def never_submitted(attempts: Sequence[Attempt]) -> bool:
    """Return whether it is certain that this run has no job: each attempt is marked before its first submission."""
    return len(attempts) == 1 and attempts[0].submitted_at is None and attempts[0].job_id is None


def claim(run: Run, attempts: Sequence[Attempt], snapshot: SchedulerSnapshot, host: str) -> Claim:
    """Decide from a scheduler's answers whether an unassigned run belongs to it; only positive evidence counts."""
    if never_submitted(attempts):
        at = run.identity.get("host") or host
        if at == host:
            return True, "it has no job in any scheduler yet"
        why = f"it was submitted on {at} while no scheduler answered; it continues with the next `orch` command there"
        return False, f"{why}, or: orch resume {run.name} --here"
    for attempt in attempts:
        for job in (*snapshot.found, *snapshot.polled.values()):
            if job.name == attempt.job_name and _is_evidence(run, job):
                return True, f"its job {job.job_id} is here"
    why = "it is not known which cluster has its jobs; on that cluster type:"
    return False, f"{why} orch resume {run.name} --here" if snapshot.swept else ""


def claim_moved(attempts: Sequence[Attempt], snapshot: SchedulerSnapshot) -> Claim:
    """Decide whether a run of another instance with the same ClusterName belongs here, since its Slurm may have moved.

    The proof is a job whose name or comment contains the run, attempt and nonce.
    """
    ours = {(attempt.run, attempt.number, attempt.nonce) for attempt in attempts}
    for job in (*snapshot.found, *snapshot.polled.values()):
        if job.state != UNREADABLE and any((tag.run, tag.attempt, tag.nonce) in ours for tag in tags(job)):
            return True, f"its job {job.job_id} is here"
    return False, ""


def _is_evidence(run: Run, job: JobStatus) -> bool:
    """Return whether a job proves ownership; a local job lost in a reboot could be from any host."""
    return job.state != UNREADABLE and not (traits(run.cluster).simulated_nodes and job.state == "NODE_FAIL")


class Domain:
    """One controller's runs, as determined by its lease's scheduler and the scheduler that commands reach now."""

    def __init__(self, actor: Actor, instance: Instance | None) -> None:
        self._actor, self.instance = actor, instance
        actor.check_scheduler = self.check_scheduler

    @property
    def scheduler(self) -> str:
        return self._actor.lease.scheduler

    def has(self, run: Run) -> bool:
        """Return whether the run is known to belong to this controller."""
        return is_ours(run, self.scheduler)

    def live(self) -> list[Run]:
        """Return the live runs that belong here or may turn out to belong here."""
        return self._own(self._actor.store.runs(LIVE_RUNS))

    def _own(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if self.has(run) or (not run.scheduler and run.cluster in self._actor.schedulers)]

    def runs_to_look_up(self, live: Sequence[Run]) -> list[Run]:
        """Return the live runs whose jobs may be in this scheduler, under its current or a former name."""
        return self._own(live) + [run for run in live if same_cluster_name(run.scheduler, self.scheduler)]

    def _unclaimed_runs(self, live: Sequence[Run]) -> list[Run]:
        """Return the live runs that may belong to a scheduler whose instance is still unknown."""
        unknown = self.scheduler and not is_known(self.scheduler)
        return [run for run in live if unknown and run.cluster in self._actor.schedulers]

    def job_records(self, runs: Sequence[Run], attempts: Mapping[str, tuple[Attempt, ...]], now: float) -> Records:
        """Return the job records of these runs, and of owned runs with submissions whose jobs were never found."""
        store, made = self._actor.store, dict[str, list[Submission]]()
        for one in store.submissions(since=now - ORPHANS_FOR):
            made.setdefault(one.run, []).append(one)
        known = {run.name: (run, attempts[run.name]) for run in runs}
        for name, several in made.items():
            # A job id means nothing in a different Slurm instance.
            if name not in known and unresolved_submissions(several) and self.has(run := store.run(name)):
                known[name] = run, tuple(store.attempts(name))
        return {
            (name, attempt.number): JobRecord.from_rows(run, attempt, made.get(name, ()))
            for name, (run, several) in known.items()
            for attempt in several
        }

    def count(self) -> int:
        """Return the number of live runs that this controller serves."""
        live = self._actor.store.runs(LIVE_RUNS)
        return len(self._unclaimed_runs(live) or self._own(live))

    def silent_schedulers(self, live: Sequence[Run]) -> dict[str, str]:
        """Map each kind of scheduler that has live runs but no known instance to the reason."""
        unclaimed = {run.cluster for run in self._unclaimed_runs(live)}
        return {kind: self.silence(kind) or "its instance is still unknown" for kind in unclaimed}

    def has_pending_request(self) -> bool:
        """Return whether a user request is waiting for this controller's answer."""
        store = self._actor.store
        return any(
            is_addressed_to(store.run(request.run), request, self.scheduler) for request in store.user_requests()
        )

    def expects(self, run: Run, attempts: Sequence[Attempt]) -> bool:
        """Return whether this scheduler should know the newest job of the run."""
        here = run.identity.get("host") in (None, "", socket.gethostname())
        return self.has(run) or (not run.scheduler and never_submitted(attempts) and here)

    def owns(self, run: Run, attempts: Sequence[Attempt], snapshot: SchedulerSnapshot) -> Claim:
        """Return whether the run belongs here; an unclaimed run is claimed on evidence only."""
        if self.has(run):
            return True, ""
        if run.scheduler and not snapshot.answered:
            return False, ""
        if not is_known(self.scheduler) or not snapshot.answered:
            return False, f"{run.cluster} does not answer, so nothing is assumed: {snapshot.error}"
        known = bool(run.scheduler)
        holds, why = claim_moved(attempts, snapshot) if known else claim(run, attempts, snapshot, socket.gethostname())
        if not holds:
            return False, why
        store = self._actor.store

        def take() -> bool:
            # Another controller may have cancelled or claimed the run since the pass began.
            live = store.run(run.name).state in LIVE_RUNS
            return live and store.claim_run(run.name, self.scheduler, epoch=self._actor.epoch, before=run.scheduler)

        if not store.together(take):
            return False, ""
        before = f" (it belonged to {run.scheduler})" if known else ""
        self._actor.record_action(f"{run.name} belongs to {self.scheduler}: {why}{before}")
        return True, why

    def check_scheduler(self, within: float) -> None:
        """Raise SchedulerChanged if commands no longer reach the lease's scheduler.

        `within`: greatest age in seconds of the answer that decides.
        """
        own, now = self.scheduler, self.instance(within) if self.instance is not None else ""
        if own and now and now != own:
            raise SchedulerChanged(f"commands now reach {now}, but this controller holds the lease of {own}")

    def silence(self, kind: str) -> str:
        """Return why this kind of scheduler must not be queried now; empty if it may be."""
        if kind not in self._actor.schedulers:
            return f"{kind} cannot be used on this machine"
        return self.instance.silence if self.instance is not None and not self.instance() else ""


log = logging.getLogger("orch.controller")


def sweep_orphans(actor: Actor, domain: Domain, kind: str, snapshot: SchedulerSnapshot) -> None:
    """Cancel the orphaned jobs that a sweep has found. Any that cannot be cancelled now are left to a later sweep."""
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
    for tag in tags(job):
        try:
            run, attempt = store.run(tag.run), store.attempt(tag.run, tag.attempt)
        except NotFound:
            continue
        record = JobRecord.from_rows(run, attempt, ())
        if run.name != tag.run:
            continue
        if identify(job, record)[0] or (tag.nonce == attempt.nonce and run.state not in LIVE_RUNS):
            return record
    return None
