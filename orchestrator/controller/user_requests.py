"""User requests to the controller (cancel, resume, priority, release or exclude a node), answered in the registry."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from checkpointing.storage.storage_errors import explain_disk_error
from orchestrator import failpoints
from orchestrator.controller.actor import Actor
from orchestrator.controller.conclude import cancel_decision
from orchestrator.controller.may_start import ENDED_BADLY
from orchestrator.controller.own_queue import PRIORITY
from orchestrator.controller.ownership import is_addressed_to, is_ours, never_submitted
from orchestrator.controller.scheduler_snapshot import SchedulerSnapshot
from orchestrator.errors import Fenced, NotFound, RegistryError, SlurmUnreachable
from orchestrator.recovery.retry_policy import after_cancel
from orchestrator.registry.reads import Reads
from orchestrator.registry.records import (
    BY_PERSON,
    EXCLUDE,
    OF_NODES,
    REFUSED,
    RELEASE,
    UNTIL_RELEASED,
    Attempt,
    Run,
    UserRequest,
)
from orchestrator.run_dirs.bounded_files import RunDirHangs
from orchestrator.run_dirs.controlled_run import ControlledRun, stored_config
from orchestrator.run_dirs.job_spec import is_live
from orchestrator.scheduler.interface import LEAVING_STATES, QUEUED_STATES, WAITING_STATES
from orchestrator.states import LIVE_ATTEMPTS, LIVE_RUNS, AttemptState, RunState
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.requests import RequestKind
from trainer.protocol.time_spans import stored_moment

log = logging.getLogger("orch.controller")

STOP_LIMIT = 300.0  # seconds that a job may take to save and stop before it is cancelled outright


def answer_idle(actor: Actor) -> bool:
    """Answer requests about runs without a live job; return whether any was answered."""
    answered = False
    for request in actor.store.user_requests():
        try:
            run = actor.store.run(request.run)
        except NotFound:
            _answer(actor, request, f"there is no run {request.run}")
            continue
        if not _accept_request(actor, run, request):
            continue
        try:
            answered |= _answer_idle(actor, run, request)
        except (Fenced, RegistryError):
            raise
        except (SlurmUnreachable, RunDirHangs) as error:
            log.warning("%s %s must wait: %s", request.verb, run.name, error.what)
        except Exception as error:  # outermost edge: an error in one request must not stop the others
            log.exception("%s %s", request.verb, run.name)
            _answer(actor, request, f"{REFUSED}the controller cannot do it: {type(error).__name__}: {error}")
            answered = True
    return answered


def _answer_idle(actor: Actor, run: Run, request: UserRequest) -> bool:
    handlers = {RELEASE: _release, EXCLUDE: _exclude, "resume": _resume, PRIORITY: _set_priority}
    if request.verb in handlers:
        return handlers[request.verb](actor, run, request)
    return request.verb == "cancel" and run.state not in LIVE_RUNS and _cancel_idle(actor, run, request)


def _record(actor: Actor, write: Callable[[], object], action: str) -> bool:
    """Apply a request's changes in one transaction; return False if `write` reports that the request came too late."""
    if actor.store.together(write) is False:
        return False
    failpoints.reach("after_ask")
    actor.record_action(action)
    return True


def _accept_request(actor: Actor, run: Run, request: UserRequest) -> bool:
    """Return whether this controller answers the request.

    It answers for runs of its scheduler, and for runs that a user is moving to it.

    A run that may have a job in another scheduler is never taken from that scheduler.
    """
    own = actor.lease.scheduler
    # Nodes of a run without a known scheduler belong to no particular controller.
    if is_ours(run, own) or (request.verb in OF_NODES and not run.scheduler and run.cluster in actor.schedulers):
        return True
    if not is_addressed_to(run, request, own):
        return False

    def take() -> bool:
        attempts = actor.store.attempts(run.name)
        live = attempts[-1].state in LIVE_ATTEMPTS and not never_submitted(attempts)
        if live and (run.scheduler or request.verb == "cancel"):
            return False
        return actor.store.claim_run(run.name, own, epoch=actor.epoch, before=run.scheduler)

    # In one transaction, because the run's own controller may be about to submit it.
    if not actor.store.together(take):
        return False
    actor.record_action(f"{run.name} now belongs to {own}, at a user's request")
    return True


def _resume(actor: Actor, run: Run, request: UserRequest) -> bool:
    attempts, digest = actor.store.attempts(run.name), request.args.get("config")
    last, changes = attempts[-1], dict[str, Any]()
    refusal = _resume_refusal(run, attempts, request)
    if not refusal:
        try:
            changes = _changes(actor, run, request)
        except ValueError as error:  # affects this request only
            refusal = f"{REFUSED}the new configuration cannot be read: {error}"
    if refusal:
        _answer(actor, request, refusal)
        return True
    fresh = last.number if last.state is AttemptState.INTENT else last.number + 1

    def resume() -> bool:
        if actor.store.run(run.name).removal:  # its removal has begun in the meantime
            return False
        stamp = actor.stamp()
        if digest and last.state is AttemptState.INTENT:
            changed: dict[str, Any] = {"config_digest": digest, "smaller_world": None}
            actor.store.note_attempt(run.name, last.number, epoch=actor.epoch, **changed)
        actor.store.move_run(
            run.name, RunState.RECOVERING, "resumed by a person", **stamp, fresh_from=fresh, not_before=0.0, **changes
        )
        actor.store.answer(request.id, f"{run.name} continues with attempt {fresh}", **stamp)
        return True

    return _record(actor, resume, f"{run.name} resumed")


def _resume_refusal(run: Run, attempts: Sequence[Attempt], request: UserRequest) -> str:
    last, digest = attempts[-1], request.args.get("config")
    if run.removal:
        return f"{REFUSED}{run.name} is being removed"
    extended = run.state is RunState.SUCCEEDED and "config" in request.args
    if run.state not in (RunState.HELD, RunState.FAILED, RunState.CANCELLED) and not extended:
        return f"{REFUSED * ('config' in request.args)}{run.name} is {run.state}: there is nothing to resume"
    if digest and last.state in LIVE_ATTEMPTS and not never_submitted(attempts):
        why = f"attempt {last.number} may have a job with the old configuration: `orch cancel {run.name}` first"
        return f"{REFUSED}{why}"
    if digest and request.args.get("base", run.config_digest) != run.config_digest:
        return f"{REFUSED}the configuration of {run.name} has changed since this was typed"
    return ""


def _changes(actor: Actor, run: Run, request: UserRequest) -> dict[str, Any]:
    changes: dict[str, Any] = {"identity": run.identity | request.args.get("identity", {})}
    if run.predecessor and ((before := actor.store.predecessor(run)) is None or before.state in ENDED_BADLY):
        changes["predecessor"] = ""
    if (digest := request.args.get("config")) is not None:
        config = stored_config(actor.store, digest)
        changes |= {"config_digest": digest, "total_steps": 0 if config.get("command") else config["train"]["steps"]}
    return changes


def _set_priority(actor: Actor, run: Run, request: UserRequest) -> bool:
    """Change a run's priority. Its pending job is moved at the end of the pass."""
    value = int(request.args["value"])

    def change() -> None:
        stamp = actor.stamp()
        actor.store.note_run(run.name, **stamp, identity=actor.store.run(run.name).identity | {PRIORITY: value})
        actor.store.answer(request.id, f"{run.name} has priority {value}", **stamp)

    return _record(actor, change, f"{run.name} has priority {value}")


def _release(actor: Actor, run: Run, request: UserRequest) -> bool:
    """Readmit a node. The reasons for its exclusion no longer count."""
    name, now = str(request.args["node"]), actor.clock.wall()
    # Runs without a known scheduler record nodes under their kind of cluster.
    known = [item for item in actor.store.nodes() if item.name == name and item.cluster in (run.domain, run.cluster)]
    excluded = [item.cluster for item in known if item.excluded_until > now]
    if not excluded:
        _answer(actor, request, f"{name} is not excluded")
        return True

    def release() -> None:
        stamp = actor.stamp()
        for cluster in excluded:
            actor.store.release_node(name, cluster, "released by a person", **stamp)
        actor.store.answer(request.id, f"{name} may be used again", **stamp)

    return _record(actor, release, f"{name} released")


def _exclude(actor: Actor, run: Run, request: UserRequest) -> bool:
    name, until = str(request.args["node"]), float(request.args["until"])
    span = "until it is released" if until >= UNTIL_RELEASED else f"until {stored_moment(until)}"

    def exclude() -> None:
        stamp = actor.stamp()
        actor.store.exclude_node(name, run.domain, until, f"{BY_PERSON}{request.args['why']}", **stamp)
        actor.store.answer(request.id, f"{name} is excluded {span}", **stamp)

    return _record(actor, exclude, f"{name} excluded {span} by {request.args['why']}")


def _cancel_idle(actor: Actor, run: Run, request: UserRequest) -> bool:
    if run.state is not RunState.HELD:
        _answer(actor, request, f"{run.name} is already {run.state}")
        return True

    # A held run may still have a job. Follow it until it has ended.
    over = actor.store.attempts(run.name)[-1].state not in LIVE_ATTEMPTS

    def cancel() -> None:
        stamp = actor.stamp()
        if not over:
            actor.store.move_run(run.name, RunState.RECOVERING, "to be cancelled once its job is gone", **stamp)
            return
        actor.store.move_run(run.name, RunState.CANCELLED, "cancelled by `orch cancel` while it was held", **stamp)
        actor.store.answer(request.id, f"{run.name} is cancelled", **stamp)

    return _record(actor, cancel, f"{run.name} {'cancelled' if over else 'will be cancelled'}")


def _answer(actor: Actor, request: UserRequest, text: str) -> None:
    actor.store.answer(request.id, text, epoch=actor.epoch, now=actor.clock.wall())
    actor.record_action(f"answered {request.verb} of {request.run}: {text}")


def advance_cancel(actor: Actor, view: ControlledRun, snapshot: SchedulerSnapshot) -> None:
    """Take the next step to end a cancelled run's job. The run becomes CANCELLED once the job is gone."""
    assert view.cancel is not None
    attempt, job = view.last, snapshot.adopted_job(view.last)
    if job is None or not is_live(job) or job.state in LEAVING_STATES:
        return
    # A job that is not training has nothing to save.
    if job.held or job.state in QUEUED_STATES | WAITING_STATES:
        actor.cancel(view.run, job.job_id, "cancelled before it started")
        return
    waited = actor.observed.age(f"cancel:{view.run.name}/{attempt.number}", view.cancel.id)
    limit = float(view.cancel.args.get("limit", STOP_LIMIT))
    if view.cancel.args.get("now") or waited >= limit:
        actor.cancel(view.run, job.job_id, "cancelled by a person")
        return
    try:
        asked = actor.request_once(view.folder, RequestKind.STOP, attempt.number, "cancelled by a person", None)
    except OSError as error:
        if not (disk := explain_disk_error(error, view.folder.path)):
            raise
        # After the scheduler's own signal, the job may still save.
        actor.cancel(view.run, job.job_id, f"cancelled by a person; the request to save cannot be written: {disk}")
        return
    if asked:
        failpoints.reach("after_stop_request")


def cancel_intent(actor: Actor, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
    """Cancel a run whose job is not known yet; return whether it certainly has no job."""
    live = snapshot.live(view.last)
    for job in live:
        actor.cancel(view.run, job.job_id, "cancelled before it was adopted")
    if not live and actor.is_absent(view.last, snapshot):
        return True
    if snapshot.answered:
        what = f"until job {live[0].job_id} has ended" if live else "until it is certain that no job was submitted"
        actor.note(view.run, f"will be cancelled: waits {what}")
    return False


def end_cancelled(actor: Actor, view: ControlledRun) -> None:
    """End the attempt of a cancelled run that certainly has no job."""
    last, stamp, why = view.last, actor.stamp(), "cancelled before it was submitted"
    actor.store.move_attempt(last.run, last.number, AttemptState.ENDED, why, **stamp, ended_at=stamp["now"])
    actor.fence(view.attempt_dir)
    mark_cancelled(actor, view)


def pending_cancels(store: Reads) -> dict[str, UserRequest]:
    """Return the oldest unanswered request to cancel each run."""
    return {one.run: one for one in reversed(store.user_requests()) if one.verb == "cancel"}


def cancel_unsubmitted(actor: Actor, run: Run, cancel: UserRequest | None) -> bool:
    """Cancel a run that was never submitted, even if no scheduler answers; return whether it is cancelled.

    A controller records each submission before it calls sbatch. If the transaction that ends the run finds no
    submission, none can follow.
    """
    name, reason = run.name, after_cancel(None).reason
    if cancel is None or (run.scheduler and not is_ours(run, actor.lease.scheduler)):
        return False

    def end() -> bool:
        now, attempts = actor.store.run(name), actor.store.attempts(name)
        if now.state not in LIVE_RUNS or now.scheduler != run.scheduler or not never_submitted(attempts):
            return False
        if attempts[0].state is not AttemptState.INTENT or actor.store.submissions(name):
            return False
        stamp, why = actor.stamp(), "cancelled before it was submitted"
        actor.store.move_attempt(name, 1, AttemptState.ENDED, why, **stamp, ended_at=actor.clock.wall())
        actor.store.move_run(name, RunState.CANCELLED, reason, **stamp)
        actor.store.answer(cancel.id, reason, **stamp)
        return True

    return _record(actor, end, f"{name} cancelled before it was submitted")


def cancel_without_folder(actor: Actor, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
    """Cancel a run whose folder is invisible by ending its jobs without saving; return whether the run is over."""
    own = snapshot.adopted_job(view.last)
    live = [job for job in (*snapshot.of_run(view.run), *([own] if own else [])) if is_live(job)]
    for job in live:
        # A job that no record of this run identifies delays the cancellation, but is never cancelled itself.
        owner = snapshot.owner(job)
        if job.state not in LEAVING_STATES and owner is not None and owner.run == view.run.name:
            actor.cancel(view.run, job.job_id, "cancelled by a person; its run directory is not visible")
    if live or not snapshot.swept:
        return False
    failure = Failure(kind=FailureKind.CANCELLED, reason="cancelled by `orch cancel`; its run directory is not visible")
    to = AttemptState.LOST if own is None else AttemptState.ENDED
    actor.store.move_attempt(
        view.run.name, view.last.number, to, failure.reason, **actor.stamp(), ended_at=actor.clock.wall(),
        failure=failure.to_json(),
    )  # fmt: skip
    mark_cancelled(actor, view)
    return True


def mark_cancelled(actor: Actor, view: ControlledRun) -> None:
    """Mark a run without a job as cancelled and answer the request."""
    assert view.cancel is not None
    cancel, reason = view.cancel, cancel_decision(actor, view).reason

    def write() -> None:
        stamp = actor.stamp()
        actor.store.move_run(view.run.name, RunState.CANCELLED, reason, **stamp)
        actor.store.answer(cancel.id, reason, **stamp)

    _record(actor, write, f"{view.run.name} cancelled")
