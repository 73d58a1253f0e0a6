"""What has to hold before a job is submitted: room in its run's folder, and no node that is excluded by then."""

from dataclasses import replace

from checkpointing.config import RUN
from orchestrator.controller.jobs.job_spec import job_spec
from orchestrator.controller.reconciler.actor import SUBMIT_WITHIN, Actor
from orchestrator.controller.reconciler.conclude import PoolSize, apply, to_avoid
from orchestrator.controller.run_dirs.room import missing_room
from orchestrator.controller.run_view import RunView
from orchestrator.errors import SubmitRejected
from orchestrator.recovery.retry_policy import Action, Decision
from orchestrator.scheduler.interface import QUEUED_STATES, JobStatus
from orchestrator.states import LIVE_ATTEMPTS
from trainer.contract.failures.outcome import FailureKind


def wait_for_room(actor: Actor, view: RunView) -> bool:
    """Whether the next job has to wait until its run's folder has room; it would train for nothing.

    A run that has waited for `recovery.no_progress_hours` is held.
    """
    wanted = _checkpoint_size(actor, view)
    lack = actor.files.call(view.folder.path, lambda: missing_room(view.folder, wanted), SUBMIT_WITHIN)
    if not lack:
        return False
    now, hours = actor.clock.wall(), view.config.recovery.no_progress_hours
    past = [attempt.ended_at for attempt in view.attempts if attempt.number >= view.run.fresh_from]
    since = max((ended for ended in past if ended is not None), default=now)
    if now - since >= hours * 3600:
        reason = f"{FailureKind.STORAGE}: {lack}, for {hours:g} h: recovery.no_progress_hours is spent"
        apply(actor, view.run, Decision(action=Action.HOLD, reason=reason), now)
    else:
        actor.note(view.run, f"{FailureKind.STORAGE}: waits for room in the run's folder: {lack}")
    return True


def with_exclusions(actor: Actor, view: RunView, pool_size: PoolSize) -> RunView:
    """The run with the nodes that its next job must not get, as they are known now: its intent may be old."""
    avoid = to_avoid(actor.store, view, actor.clock.wall(), pool_size)
    if avoid == view.last.excluded:
        return view
    actor.store.note_attempt(view.run.name, view.last.number, epoch=actor.epoch, excluded=avoid)
    return _avoiding(view, avoid)


def update_exclusions(actor: Actor, view: RunView, job: JobStatus, pool_size: PoolSize) -> None:
    """Keep a job that waits off the nodes that are excluded by now, and no longer off those that are not."""
    if job.held or job.state not in QUEUED_STATES or view.cancel is not None:
        return
    fresh = _avoiding(view, to_avoid(actor.store, view, actor.clock.wall(), pool_size))
    attempt, refused = fresh.last, f"avoid:{view.run.name}/{view.last.number}"
    if attempt.excluded == view.last.excluded or actor.observed.value(refused) == str(attempt.excluded):
        return
    exclude = job_spec(view.run, attempt, view.config).resources.exclude
    scheduler = actor.schedulers[view.run.cluster]
    actor.renew_lease()
    try:
        actor.files.call(
            view.folder.path, lambda: scheduler.release(job.job_id, view.attempt_dir.submission, exclude), SUBMIT_WITHIN
        )
    except SubmitRejected as error:
        actor.observed.age(refused, attempt.excluded)
        actor.record_action(f"{view.run.name}/{attempt.number}: {error.what}")
        return
    actor.store.note_attempt(view.run.name, attempt.number, epoch=actor.epoch, excluded=attempt.excluded)
    actor.record_action(f"job {job.job_id} of {view.run.name} avoids {', '.join(attempt.excluded) or 'no node'}")


def _avoiding(view: RunView, avoid: tuple[str, ...]) -> RunView:
    return replace(view, attempts=(*view.attempts[:-1], replace(view.last, excluded=avoid)))


def _checkpoint_size(actor: Actor, view: RunView) -> int:
    """Bytes of a checkpoint in the run's own folder, after an attempt that could not save there; else 0."""
    failures = [attempt.failure for attempt in view.attempts if attempt.state not in LIVE_ATTEMPTS]
    failure = failures[-1] if failures else None
    if failure is None or failure["kind"] != FailureKind.STORAGE or not _saves_there(view):
        return 0
    own = [one for one in actor.store.checkpoints(view.run.name) if not one.tier]
    newest = max(own, key=lambda one: one.step).bytes if own else 0
    return int(failure.get("room") or newest)


def _saves_there(view: RunView) -> bool:
    """Whether checkpoints go into the run's own folder first, which is all that can be looked at from here."""
    tiers = view.config.checkpoint.tiers
    return not view.config.command and (not tiers or tiers[0].path == RUN)
