"""Conditions for a launch, the controller's actions on a live job, and the node count of a run's attempts.

A job that waits too long for nodes is cancelled, and the next attempt uses the available nodes. Each decision is
recorded before it takes effect: a cancellation as a stop request, and an attempt's size with its intent.
"""

from dataclasses import replace
from typing import Any

from checkpointing.config import RUN
from orchestrator.config.run_config import RunConfig
from orchestrator.controller.actor import SUBMIT_WITHIN, Actor, ignored_disk_errors
from orchestrator.controller.collect_evidence import GAVE_UP, REQUEUED, SILENCED
from orchestrator.controller.conclude import apply
from orchestrator.controller.nodes_to_avoid import to_avoid
from orchestrator.controller.requeued_jobs import launch_requeued
from orchestrator.errors import SlurmUnreachable, SubmitRejected, TierUnread
from orchestrator.recovery.classify_failure import Escalation, Evidence, judge_silence
from orchestrator.recovery.elastic_policy import (
    LastAttempt,
    asked_nodes,
    choose_smaller_world,
    full_size,
    give_up_waiting,
    needs_choice,
    next_size,
    on_nodes,
    resize_config,
    world_sizes,
)
from orchestrator.run_dirs.controlled_run import ControlledRun, stored_config
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.run_dirs.run_folder import missing_room
from orchestrator.scheduler.interface import (
    LEAVING_STATES,
    QUEUED_STATES,
    RUNNING_STATES,
    WAITING_STATES,
    JobStatus,
)
from orchestrator.scheduler.slurm.refusals import waits_for_nodes
from orchestrator.states import LIVE_ATTEMPTS, AttemptState
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.requests import RequestKind
from trainer.protocol.time_spans import span


def wait_for_room(actor: Actor, view: ControlledRun) -> bool:
    """Return whether the next job must wait for disk space in the run's folder, without which it could not save.

    A run that has waited for `recovery.no_progress_hours` is held.
    """
    wanted = _checkpoint_size(actor, view)
    lack = actor.in_folder(view.folder, lambda: missing_room(view.folder, wanted), SUBMIT_WITHIN)
    if not lack:
        return False
    if not _hold_after_hours(actor, view, f"{FailureKind.STORAGE}: {lack}"):
        actor.note(view.run, f"{FailureKind.STORAGE}: waits for disk space in the run's folder: {lack}")
    return True


def _hold_after_hours(actor: Actor, view: ControlledRun, reason: str) -> bool:
    """Hold a run that has stayed in its state for `recovery.no_progress_hours`; return whether it was held."""
    now, hours = actor.clock.wall(), view.config.recovery.no_progress_hours
    moves = [move.time for move in actor.store.transitions(view.run.name) if move.kind == "run"]
    if now - max(moves, default=now) < hours * 3600:
        return False
    spent = f"{reason}, for {hours:g} h: recovery.no_progress_hours is spent"
    apply(actor, view.run, Decision(action=Action.HOLD, reason=spent), now)
    return True


def wait_for_tiers(actor: Actor, view: ControlledRun) -> tuple[bool, str]:
    """Return whether the next job must wait for an unreadable tier, because otherwise it would repeat steps.

    The second value names the unreadable tiers that the job does without. A run that has waited for
    `recovery.no_progress_hours` is held.
    """
    try:
        found = actor.find_checkpoints(view.run, view.attempts, view.folder, view.config)
    except TierUnread as error:
        reason = f"{error.what}; {error.where}; {error.hint}"
        if not _hold_after_hours(actor, view, reason):
            actor.note(view.run, f"{reason}; retrying until it works")
        return True, ""
    return False, "; ".join(
        f"without the tier {path}, which cannot be read: {error.strerror or error}"
        for path, error in found.unread.items()
    )


def with_exclusions(actor: Actor, view: ControlledRun) -> ControlledRun:
    """Return the run with the nodes that its next job must avoid now; the recorded intent may be outdated."""
    avoid = to_avoid(actor, view)
    if avoid == view.last.excluded:
        return view
    actor.store.note_attempt(view.run.name, view.last.number, epoch=actor.epoch, excluded=avoid)
    return _avoiding(view, avoid)


def update_exclusions(actor: Actor, view: ControlledRun, job: JobStatus) -> None:
    """Apply the current exclusions to a queued job, both additions and removals."""
    if job.held or job.state not in QUEUED_STATES or view.cancel is not None or view.last.restarts:
        return  # Slurm refuses every change to an expedited job
    try:
        fresh = _avoiding(view, to_avoid(actor, view))
    except SlurmUnreachable:  # keep the current exclusions until Slurm answers
        return
    attempt, refused = fresh.last, f"avoid:{view.run.name}/{view.last.number}"
    if attempt.excluded == view.last.excluded or actor.observed.value(refused) == str(attempt.excluded):
        return
    exclude = job_spec(view.run, attempt, view.config).resources.exclude
    scheduler = actor.schedulers[view.run.cluster]
    actor.renew_lease()
    try:
        submission = view.attempt_dir.submission
        actor.in_folder(view.folder, lambda: scheduler.release(job.job_id, submission, exclude), SUBMIT_WITHIN)
    except SubmitRejected as error:
        actor.observed.age(refused, attempt.excluded)
        actor.record_action(f"{view.run.name}/{attempt.number}: {error.what}")
        return
    actor.store.note_attempt(view.run.name, attempt.number, epoch=actor.epoch, excluded=attempt.excluded)
    actor.record_action(f"job {job.job_id} of {view.run.name} avoids {', '.join(attempt.excluded) or 'no node'}")


def _avoiding(view: ControlledRun, avoid: tuple[str, ...]) -> ControlledRun:
    return replace(view, attempts=(*view.attempts[:-1], replace(view.last, excluded=avoid)))


def _checkpoint_size(actor: Actor, view: ControlledRun) -> int:
    """Return a checkpoint's size in bytes if the last attempt could not save one in the run's folder; else 0."""
    failures = [attempt.failure for attempt in view.attempts if attempt.state not in LIVE_ATTEMPTS]
    failure, tiers = failures[-1] if failures else None, view.config.checkpoint.tiers
    # The run's own folder is the only location that this host can check.
    saves_there = not view.config.command and (not tiers or tiers[0].path == RUN)
    if failure is None or failure["kind"] != FailureKind.STORAGE or not saves_there:
        return 0
    own = [checkpoint for checkpoint in actor.store.checkpoints(view.run.name) if not checkpoint.tier]
    newest = max(own, key=lambda one: one.step).bytes if own else 0
    return int(failure.get("room") or newest)


def end_job(actor: Actor, view: ControlledRun, job_id: str, reason: str, detail: str = SILENCED) -> None:
    """Cancel a job of the newest attempt. Without the recorded stop request, it would look like a user's scancel."""
    actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, detail)
    actor.cancel(view.run, job_id, reason)


def end_judged_job(actor: Actor, view: ControlledRun, job_id: str, reason: str) -> None:
    """Cancel a job whose attempt is already judged, even if the disk is too full to record the intent."""
    with ignored_disk_errors():
        actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, SILENCED)
    actor.cancel(view.run, job_id, reason)


SAVED_WITHIN = 30.0
"""Seconds after which slurmctld is sure to have saved a job's release. It saves every 5 s."""


def is_held_by_person(actor: Actor, view: ControlledRun, job: JobStatus) -> bool:
    """Return whether a person holds a released job. A release that Slurm lost looks the same, but is more recent."""
    if view.last.restarts:  # orch continues only in requeued jobs that it need not release
        return job.held
    key = f"unheld:{view.run.name}/{view.last.number}"
    if not job.held:
        actor.observed.age(key, job.job_id)
        return False
    return actor.observed.value(key) == job.job_id and actor.observed.age(key, job.job_id) >= SAVED_WITHIN


def maintain_job(actor: Actor, view: ControlledRun, job: JobStatus) -> None:
    """Launch a live job, send it its actual deadline, or end it if Slurm has restarted it."""
    if view.last.restarts and not view.last.generations and view.cancel is None:
        launch_requeued(actor, view)
    # A slurmctld that lost its latest state requeues a running job without counting a restart.
    forgotten = view.last.state is AttemptState.RUNNING and job.state in QUEUED_STATES
    if (job.restarts > view.last.restarts or forgotten) and job.state not in LEAVING_STATES:
        end_job(actor, view, job.job_id, "requeued by Slurm: it must not train again", REQUEUED)
    elif job.held and view.cancel is None and not is_held_by_person(actor, view, job):
        _release(actor, view, job)
    elif job.state in RUNNING_STATES and job.end_time is not None:
        with ignored_disk_errors():  # without the request, its agents use the configured limit
            lasts = "" if job.start_time is None else f"{job.end_time - job.start_time:.0f}"
            why = "the job's end according to Slurm"
            actor.request_once(view.folder, RequestKind.DEADLINE, view.last.number, why, job.end_time, lasts)


def _release(actor: Actor, view: ControlledRun, job: JobStatus) -> None:
    """Release the job. If it has waited for a tier for `recovery.no_progress_hours`, end it so that the run is held."""
    try:
        actor.release(view.run, view.last, view.folder, view.config)
    except TierUnread as error:
        waited = actor.clock.wall() - (view.last.submitted_at or view.last.intent_at)
        if waited < view.config.recovery.no_progress_hours * 3600:
            raise
        end_job(actor, view, job.job_id, f"{error.what}; {error.where}")


def end_silent_job(actor: Actor, view: ControlledRun, job: JobStatus, evidence: Evidence) -> None:
    """Stop, then cancel, a job whose coordinator has been silent for too long and which would idle until its limit."""
    step, reason = judge_silence(evidence, view.config.detection.hang.heartbeat)
    if step is Escalation.REQUEST_STOP:
        # The request also proves that the directory is writable from here.
        actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, SILENCED)
    elif step is Escalation.CANCEL:
        end_job(actor, view, job.job_id, reason)


def give_up_long_wait(actor: Actor, view: ControlledRun, full: RunConfig, job: JobStatus, evidence: Evidence) -> None:
    """End a job that has waited for nodes longer than `recovery.patience` if a smaller job could start.

    `full`: the run's own config; the attempt's may be for a smaller world.
    """
    if view.cancel is not None or not full.cluster.min_nodes or job.state in LEAVING_STATES:
        return
    if evidence.gave_up:  # the controller was killed before it cancelled the job, or its scancel was lost
        end_job(actor, view, job.job_id, evidence.gave_up, GAVE_UP)
        return
    key, waits = f"waits:{view.run.name}/{view.last.number}", waits_for_nodes(job.reason)
    if job.held or job.state not in WAITING_STATES or waits is False:
        actor.observed.forget(key)
        return
    waited, patience = actor.observed.age(key, job.job_id), full.recovery.patience
    if not waits or waited < patience:
        return
    try:
        usable = _usable(actor, view, full)
    except SlurmUnreachable:  # a missing answer proves nothing
        return
    why = give_up_waiting(world_sizes(full), view.config.cluster.all_nodes, waited, patience, usable)
    if why:
        end_job(actor, view, job.job_id, why, GAVE_UP)


def size_note(view: ControlledRun, full: RunConfig, job: JobStatus) -> str:
    """Return a note on the newest attempt's size and on when a wait for nodes will end."""
    world = view.last.smaller_world
    words = [on_nodes(world)] if world else []
    waits = bool(full.cluster.min_nodes) and job.state in WAITING_STATES and waits_for_nodes(job.reason)
    if waits and any(size.all_nodes < view.config.cluster.all_nodes for size in world_sizes(full)):
        words.append(f"after {span(full.recovery.patience)} of waiting, the next job requests fewer nodes")
    return "; ".join(words)


def next_world(actor: Actor, view: ControlledRun) -> dict[str, Any]:
    """Return the fields for `add_attempt` in which the next attempt differs from the run, and the reason.

    Stores the attempt's config. Raises SlurmUnreachable.
    """
    sizes, full = world_sizes(view.config), full_size(view.config)
    last = _last(view, full.all_nodes, actor.clock.wall())
    if not needs_choice(sizes, last):
        return {}
    usable = _usable(actor, view, view.config)
    size, reason = next_size(sizes, last, usable, view.config.recovery.patience)
    if size.all_nodes == full.all_nodes:
        return {"reason": f"next attempt on {reason}"} if reason else {}
    base = stored_config(actor.store, view.run.config_digest)
    data = resize_config(base, size)
    world = choose_smaller_world(data["cluster"], base["cluster"], view.run.config_digest, reason)
    digest = actor.store.put_config(data)
    return {"config_digest": digest, "smaller_world": world, "reason": f"next attempt {on_nodes(world)}"}


def _last(view: ControlledRun, full: int, now: float) -> LastAttempt:
    """Describe the newest attempt. After a resume it does not count, because the config may have changed."""
    last, failure = view.last, view.last.failure
    if last.number < view.run.fresh_from:
        return LastAttempt(asked=full)
    asked = full if last.smaller_world is None else asked_nodes(last.smaller_world)
    if failure is None:
        return LastAttempt(asked=asked)
    kind, refused_for = FailureKind(failure["kind"]), now - _refused_since(view, now)
    return LastAttempt(asked=asked, kind=kind, reason=str(failure["reason"]), refused_for=refused_for)


def _refused_since(view: ControlledRun, now: float) -> float:
    """Return the start of the newest unbroken series of rejected full-size attempts; `now` if the last was accepted."""
    since = now
    for attempt in reversed(view.attempts):
        kind = (attempt.failure or {}).get("kind")
        if kind != FailureKind.SUBMIT_DEFERRED or attempt.smaller_world or attempt.number < view.run.fresh_from:
            break
        since = min(since, attempt.intent_at)
    return since


def _usable(actor: Actor, view: ControlledRun, full: RunConfig) -> int | None:
    """Count the nodes in service that the smallest job would not avoid. A larger job avoids the same nodes."""
    smallest = world_sizes(full)[-1].all_nodes
    avoid = to_avoid(actor, replace(view, config=full), smallest)
    actor.renew_lease_if_due()
    return actor.usable_nodes(job_spec(view.run, view.last, view.config).resources, frozenset(avoid))
