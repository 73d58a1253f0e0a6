"""What has to hold before a job is submitted: room in its run's folder."""

from checkpointing.config import RUN
from orchestrator.controller.reconciler.actor import SUBMIT_WITHIN, Actor
from orchestrator.controller.reconciler.conclude import apply
from orchestrator.controller.run_dirs.room import missing_room
from orchestrator.controller.run_view import RunView
from orchestrator.recovery.retry_policy import Action, Decision
from orchestrator.states import LIVE_ATTEMPTS
from trainer.contract.outcome import FailureKind


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
