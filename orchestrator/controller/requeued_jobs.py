"""The next attempt of a run in a job that Slurm has requeued, or the end of such a job.

After a node failure, an expedited requeue (Slurm 25.11) keeps the surviving nodes for the job under the same id, as
another run of the job with its own SLUID. Slurm starts the job's script again, and its agents wait for the GO of the
attempt that continues in it. This also happens after a `scontrol requeue` that gives the job nodes at once, and if a
person holds the job: the attempt then waits for its release. Any other requeued job that waits, or that Slurm itself
holds, is unwanted, because a new job starts sooner: orch cancels it.
"""

import re
from secrets import token_hex

from checkpointing.storage.durable import dump_line, write_durably
from orchestrator import failpoints
from orchestrator.controller.actor import Actor, ignored_disk_errors
from orchestrator.controller.collect_evidence import SILENCED, slurm_logs
from orchestrator.controller.nodes_to_avoid import to_avoid
from orchestrator.registry.records import Attempt
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, JobStatus
from orchestrator.states import AttemptState, RunState
from trainer.protocol.config import AUTO
from trainer.protocol.requests import RequestKind, pending

_KEEPS_NODES = frozenset({"EXPEDITING", "CONFIGURING", "RUNNING"})
"""States of a requeued job that has nodes. After most other requeues, a job is PENDING or held."""


_PERSONS_HOLD = re.compile(r"JobHeld(User|Admin)|job requeued in held state")
"""Reasons of a PENDING job after `scontrol hold` and `scontrol requeuehold`.

Slurm's own hold after a failed job has the state REQUEUE_HOLD, and after a failed launch another reason.
"""


def _has_persons_hold(job: JobStatus) -> bool:
    return job.held and _PERSONS_HOLD.fullmatch(job.reason) is not None


def why_not_continued(view: ControlledRun, job: JobStatus) -> str:
    """Return why the next attempt needs a new job; empty if it can continue in this requeued one."""
    last = view.last
    if view.cancel is not None:
        return "the run is being cancelled"
    if view.config.recovery.requeue != AUTO:
        return f"recovery.requeue is {view.config.recovery.requeue}"
    if job.state not in _KEEPS_NODES and not _has_persons_hold(job):
        return f"it is {job.state}{' and held' if job.held else ''}"
    if last.base_digest != view.run.config_digest or last.number < view.run.fresh_from:
        return "the run's configuration has changed"
    avoided = sorted(set(job.nodes) & set(last.excluded))
    return f"it has nodes to avoid: {', '.join(avoided)}" if avoided else ""


def adopt_requeued(actor: Actor, view: ControlledRun, job: JobStatus) -> Attempt:
    """Record the next attempt, which continues in a requeued job: it needs no submission, and its job is known."""
    run, last, avoid = view.run, view.last, to_avoid(actor, view)
    reason = f"job {job.job_id} continues: Slurm requeued it and kept its surviving nodes"
    if job.state in ENDED_STATES:
        reason = f"job {job.job_id} is {job.state}, after Slurm had requeued it"
    failpoints.reach("before_next_intent")

    def record() -> Attempt:
        stamp = actor.stamp()
        known = {"job_id": job.job_id, "submit_time": job.submit_time, "sluid": job.sluid, "restarts": job.restarts}
        attempt = actor.store.add_attempt(
            run.name, nonce=token_hex(4), excluded=avoid, reason=reason, **stamp,
            config_digest=last.config_digest, smaller_world=last.smaller_world, submitted_at=stamp["now"], **known,
        )  # fmt: skip
        to = AttemptState.SUBMITTED
        actor.store.move_attempt(run.name, attempt.number, to, reason, **stamp, job_state=job.state)
        actor.store.move_run(run.name, RunState.QUEUED, reason, **stamp)
        return actor.store.attempt(run.name, attempt.number)

    attempt = actor.store.together(record)
    failpoints.reach("after_next_intent")
    actor.record_action(f"{run.name}: attempt {attempt.number} continues in job {job.job_id}")
    return attempt


def launch_requeued(actor: Actor, view: ControlledRun) -> None:
    """Write the GO of an attempt in a requeued job, unless it is in force."""
    attempt = view.last
    actor.make_attempt_dir(view, attempt)
    actor.in_folder(view.folder, lambda: _record_log_sizes(view))
    actor.write_go(view.run, attempt, view.folder, view.config)


def _record_log_sizes(view: ControlledRun) -> None:
    """Record what Slurm's output files of the job hold already, because the job appends to them."""
    place, submitter = view.attempt_dir, submitting_attempt(view)
    if not place.requeued.exists():
        logs = {path.name: path.stat().st_size for path in slurm_logs(view.folder.attempt(submitter).submission)}
        write_durably(place.requeued, dump_line({"submitted_by": submitter, "logs": logs}).encode())


def submitting_attempt(view: ControlledRun) -> int:
    """Return the number of the attempt whose submission created the newest attempt's job."""
    return next(attempt.number for attempt in reversed(view.attempts) if not attempt.restarts)


def end_requeued(actor: Actor, view: ControlledRun, job: JobStatus, why: str) -> None:
    """Cancel a requeued job in which no attempt continues."""
    if job.state not in LEAVING_STATES:
        reason = f"requeued by Slurm, but the next attempt gets a new job: {why}"
        with ignored_disk_errors():  # without the request, the job would look like one that somebody else cancelled
            actor.request_once(view.folder, RequestKind.STOP, view.last.number, reason, None, SILENCED)
        actor.cancel(view.run, job.job_id, reason)


def is_ended_by_orch(actor: Actor, view: ControlledRun) -> bool:
    """Return whether orch or its user ended the requeued job: its cancellation is then no reason to hold the run."""
    if view.cancel is not None or view.last.number < view.run.fresh_from:
        return True
    asked = actor.in_folder(view.folder, lambda: pending(view.folder.requests, view.last.number, set()))
    return any(request.kind is RequestKind.STOP for request in asked)
