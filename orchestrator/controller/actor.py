"""The controller's effects outside the registry: submit, release, cancel, GO and requests. All are repeatable."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from checkpointing.storage.storage_errors import is_disk_error
from orchestrator import failpoints
from orchestrator.config.run_config import RunConfig
from orchestrator.controller.scheduler_snapshot import JobRecord, SchedulerSnapshot, changes, identify
from orchestrator.controller.submission_limits import (
    ADOPTED,
    CANCELLED,
    HOUR,
    REFUSED,
    SubmitStep,
    rejection_failure,
    submit_permission,
    unresolved_submissions,
)
from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitRejected, TierUnread
from orchestrator.observed_since import Clock, ObservedSince
from orchestrator.recovery import failure_rate
from orchestrator.registry.lease import LEASE_TTL
from orchestrator.registry.records import Attempt, Lease, Run, Submission
from orchestrator.registry.store import Store
from orchestrator.run_dirs import staged_secrets
from orchestrator.run_dirs.bounded_files import DirectFiles, Files
from orchestrator.run_dirs.controlled_run import ControlledRun, stored_config
from orchestrator.run_dirs.job_spec import is_live, job_spec, oldest
from orchestrator.run_dirs.run_folder import ensure_attempt_dir
from orchestrator.scheduler.interface import UNREADABLE, UNRECORDED, Backoff, JobStatus, Resources, Scheduler
from orchestrator.scheduler.scheduler_instance import BEFORE_EFFECT, KEEP_FOR
from orchestrator.scheduler.script import find_job_ids
from orchestrator.states import AttemptState, RunState
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.launch_token import LaunchToken, is_revoked, revoke
from trainer.protocol.requests import Request, RequestKind, pending
from trainer.protocol.run_dir import AttemptDir, RunDir

if TYPE_CHECKING:
    from orchestrator.run_dirs.inheritable_checkpoints import RunCheckpoints


T = TypeVar("T")


def training_notes(store: Store, attempt: Attempt) -> list[str]:
    """Return what the user should know about an attempt: unaccepted code changes and restarts that diverged."""
    newest = {notice.kind: notice.data for notice in store.notices(attempt.run) if notice.attempt == attempt.number}
    code, restart = newest.get(EventKind.CODE_CHANGED), newest.get(EventKind.RESTART_DIFFERS)
    notes = []
    if code is not None and not code.get("accepted"):
        notes.append(f"runs different code: {code.get('reason')}")
    if restart is not None:
        notes.append(f"diverged after a restart: {restart.get('reason')}")
    return notes


AMBIGUOUS_FOR = 60.0  # seconds of answered look-ups without a match before the job counts as absent

SUBMIT_WITHIN = 180.0
"""Seconds allowed for file work that can be slow when nothing is wrong: Slurm commands, or tiers with many files."""

EXCLUDED_HINT = "excluded (see `orch nodes ls`; readmit with `orch nodes release NODE`)"
"""Hint for a rejected job that had nodes to avoid."""

SAME_TIME_S = 30.0  # a new deadline is requested only if it differs from the last one by more than this


PoolSize = Callable[[RunConfig], int | None]
UsableNodes = Callable[[Resources, frozenset[str]], int | None]
"""Number of nodes in service that could run a job with these resources, including busy nodes but not the named ones.

None if the scheduler cannot report it. Raises SlurmUnreachable if it does not answer.
"""
DescribeWait = Callable[[JobStatus, Resources, float], str]
"""Figures for a pending job that has had the same reason for some seconds; "" if none are known."""


class Stamp(TypedDict):
    """Epoch and time that the controller passes with every write."""

    epoch: int
    now: float


class Actor:
    """Effects performed under one lease. Each first checks that the lease is still held, and raises Fenced if not."""

    def __init__(
        self, store: Store, schedulers: Mapping[str, Scheduler], clock: Clock, observed: ObservedSince
    ) -> None:
        self.store, self.schedulers, self.clock, self.observed = store, schedulers, clock, observed
        self.lease = Lease(epoch=0, holder="", renewed_at=0.0, expires_at=0.0)
        self.files: Files = DirectFiles()
        self.actions: list[str] = []
        self._renewed_at = 0.0  # on the monotonic clock
        self._pauses = Backoff(clock.mono)
        self.ambiguous_for = AMBIGUOUS_FOR
        self.check_scheduler: Callable[[float], None] = lambda within: None
        self.pool_size: PoolSize = lambda config: None
        self.usable_nodes: UsableNodes = lambda asked, without: None
        self.describe_wait: DescribeWait = lambda job, asked, waited: ""

    def start_pass(self, lease: Lease) -> None:
        self.lease, self.actions, self._renewed_at = lease, [], self.clock.mono()

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    def stamp(self) -> Stamp:
        return {"epoch": self.lease.epoch, "now": self.clock.wall()}

    def renew_lease(self, *, checked_within: float = BEFORE_EFFECT) -> None:
        """Renew the lease. Raises Fenced if it is lost or if commands now reach a different scheduler.

        The scheduler's name is asked for if the last answer is older than `checked_within` seconds.
        """
        self.check_scheduler(checked_within)
        self.lease = self.store.renew_lease(self.lease, self.clock.wall(), LEASE_TTL)
        self._renewed_at = self.clock.mono()

    def renew_lease_if_due(self) -> None:
        """Renew the lease once a sixth of its TTL has passed, because a look-up may take a minute. Raises Fenced."""
        if self.clock.mono() - self._renewed_at >= LEASE_TTL / 6:
            self.renew_lease(checked_within=KEEP_FOR)

    def record_action(self, what: str) -> None:
        self.actions.append(what)

    def in_folder(self, folder: RunDir, work: Callable[[], T], patience: float | None = None) -> T:
        """Return the result of `work` on this run's files. Raises RunDirHangs, or whatever `work` raises."""
        return self.files.call(folder.path, work, patience)

    # -- from an intent to exactly one job

    def launch(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> Failure | None:
        """Advance an INTENT towards SUBMITTED; return a Failure if that is impossible."""
        attempt = view.last
        live = snapshot.live(attempt)
        if live:
            self._adopt(view, live)
            return None
        if not self.is_absent(attempt, snapshot):
            self._wait_for_look_ups(view, snapshot)
            return None
        now = self.clock.wall()
        own = self._submissions(view)
        step, reason = submit_permission(own, self.store.submissions(since=now - HOUR), now)
        if step is SubmitStep.GIVE_UP:
            # If sbatch has repeatedly acknowledged a job that cannot be found, a person must investigate. If sbatch
            # itself failed, the fault is transient. A single lost job may have been cancelled by hand.
            lost = unresolved_submissions(own)
            repeated = 2 * sum(bool(one.job_id) for one in lost) > len(lost)
            kind = FailureKind.SUBMISSION_LOST if repeated else FailureKind.JOB_LOST
            return Failure(kind=kind, reason=reason)
        if step is SubmitStep.WAIT:
            self.note(view.run, reason)
            return None
        return self._submit_and_look(view)

    def is_absent(self, attempt: Attempt, snapshot: SchedulerSnapshot) -> bool:
        """Return whether it is certain that this attempt has no job."""
        key = f"absent:{attempt.job_name}"
        # A missing answer proves nothing, so the timing of the absence starts over.
        if not snapshot.swept:
            self.observed.forget(key)
            return False
        # The mark is written before sbatch runs; without it, nothing was submitted.
        if attempt.submitted_at is None:
            return True
        return self.observed.age(key, attempt.submitted_at) >= self.ambiguous_for

    def _wait_for_look_ups(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> None:
        if not snapshot.swept:
            error = f": {snapshot.error}" if snapshot.error else ""
            self.note(view.run, f"waits until {view.run.cluster} lists its jobs{error}")
            return
        self._take_ids_from_folder(view)
        ids = [one.job_id for one in self._submissions(view) if one.job_id]
        self.note(view.run, f"{_search_note(ids)}; it is resubmitted after {self.ambiguous_for:.0f} s")

    def _take_ids_from_folder(self, view: ControlledRun) -> None:
        """Recover job ids from submitit's file names if a controller died after sbatch, before recording the id."""
        recorded = self._submissions(view)
        open_ones = [one for one in unresolved_submissions(recorded) if one.job_id is None]
        if not open_ones:
            return
        known = {one.job_id for one in recorded}
        there = self.in_folder(view.folder, lambda: find_job_ids(view.attempt_dir.submission))
        left = sorted(there - known, key=lambda job_id: (len(job_id), job_id))
        for one, job_id in zip(open_ones, left, strict=False):
            self.store.note_submission(one.run, one.attempt, one.number, epoch=self.epoch, job_id=job_id)

    def _submissions(self, view: ControlledRun) -> list[Submission]:
        return [one for one in self.store.submissions(view.run.name) if one.attempt == view.last.number]

    def _handle_rejection(self, view: ControlledRun, error: SubmitRejected | ConfigError) -> Failure:
        """Return the failure for a rejected submission, and end the exclusion of nodes that Slurm no longer knows."""
        stamp, domain = self.stamp(), view.run.domain
        for node in error.unknown_nodes if isinstance(error, SubmitRejected) else ():
            self.store.exclude_node(node, domain, stamp["now"], "Slurm no longer knows this node", **stamp)
        avoided = ", ".join(view.last.excluded)
        also = f"{avoided} {EXCLUDED_HINT}" if avoided and not getattr(error, "unknown_nodes", ()) else ""
        return rejection_failure(view.run, error, also, accepted=any(attempt.job_id for attempt in view.attempts))

    def _submit_and_look(self, view: ControlledRun) -> Failure | None:
        attempt, scheduler = view.last, self.schedulers[view.run.cluster]
        job_id, answered = None, False
        try:
            job_id, answered = self._submit(view, scheduler), True
        except (SubmitRejected, ConfigError) as error:
            return self._handle_rejection(view, error)
        except SlurmUnreachable as error:
            # The job may exist despite the error. Only look-ups can tell, in this pass or a later one.
            self.record_action(f"{view.run.name}/{attempt.number}: {error.what}: looking for the job")
            self.note(view.run, f"looks for its job, which may exist: {error.what}")
        record = replace(JobRecord.from_rows(view.run, attempt, self._submissions(view)), fresh=job_id)
        found = self._look_up(scheduler, record)
        live = [job for job in found if identify(job, record)[0] and is_live(job) and job.state != UNREADABLE]
        if live:
            self._adopt(view, live)
        elif answered:
            self.note(view.run, _search_note([job_id] if job_id is not None else []))
        return None

    @staticmethod
    def _look_up(scheduler: Scheduler, record: JobRecord) -> list[JobStatus]:
        """Return the jobs of an attempt after its submission: by id, or by name if another submission is open too."""
        if record.fresh is None or len(unresolved_submissions(record.submissions)) > 1:
            return scheduler.find(record.name, record.ids)
        return [job for job in scheduler.poll([record.fresh]).values() if job.state != UNRECORDED]

    def make_attempt_dir(self, view: ControlledRun, attempt: Attempt) -> None:
        """Create an attempt's folder with its config."""
        config = stored_config(self.store, attempt.config_digest or view.run.config_digest)
        base = stored_config(self.store, attempt.base_digest) if attempt.smaller_world else None
        self.in_folder(view.folder, lambda: ensure_attempt_dir(view.folder, attempt, config, base))

    def _submit(self, view: ControlledRun, scheduler: Scheduler) -> str | None:
        """Submit the job, recording the intent before and the id right after. Return the id if sbatch printed one."""
        attempt, run = view.last, view.run.name
        failpoints.reach("before_mark")
        self.renew_lease()
        self.make_attempt_dir(view, attempt)
        self.in_folder(view.folder, lambda: staged_secrets.require(view.folder, view.config.env_from))
        spec = job_spec(view.run, attempt, view.config)
        now = self.clock.wall()

        def mark() -> int:
            self.store.note_attempt(run, attempt.number, epoch=self.epoch, submitted_at=now)
            return self.store.add_submission(run, attempt.number, epoch=self.epoch, now=now)

        number = self.store.together(mark)
        failpoints.reach("before_submit")
        try:
            job_id = self.in_folder(view.folder, lambda: scheduler.submit(spec), SUBMIT_WITHIN)
        except (SubmitRejected, ConfigError, Precondition):
            self.store.note_submission(run, attempt.number, number, epoch=self.epoch, outcome=REFUSED)
            raise
        finally:
            self.observed.forget(f"absent:{attempt.job_name}")
        failpoints.reach("after_sbatch")
        if job_id is not None:
            self.store.note_submission(run, attempt.number, number, epoch=self.epoch, job_id=job_id)
        failpoints.reach("after_submit")
        self.record_action(f"submitted {attempt.job_name}")
        return job_id

    def _adopt(self, view: ControlledRun, live: list[JobStatus]) -> None:
        failpoints.reach("after_find")
        attempt, job = view.last, oldest(live)
        for other in live:
            if other is not job:
                self.cancel(view.run, other.job_id, f"a duplicate of {job.job_id}")
                failpoints.reach("after_cancel_duplicate")
        failpoints.reach("after_adopt")
        self.observed.forget(f"absent:{attempt.job_name}")
        reason = f"job {job.job_id} is queued"
        if changed := changes(job, job_spec(view.run, attempt, view.config)):
            reason = f"{reason}; {changed}"

        def record_submission() -> None:
            self._resolve(view, job, live)
            job_of: dict[str, Any] = {"job_id": job.job_id, "submit_time": job.submit_time, "job_state": job.state}
            job_of["sluid"] = job.sluid
            to, stamp = AttemptState.SUBMITTED, self.stamp()
            self.store.move_attempt(view.run.name, attempt.number, to, reason, **stamp, **job_of)
            if view.run.state is not RunState.HELD:
                self.store.move_run(view.run.name, RunState.QUEUED, reason, **stamp)

        self.store.together(record_submission)
        failpoints.reach("after_submitted")
        also = f": {changed}" if changed else ""
        self.record_action(f"adopted job {job.job_id} for {view.run.name}/{attempt.number}{also}")
        self.release(view.run, self.store.attempt(view.run.name, attempt.number), view.folder, view.config)

    def _resolve(self, view: ControlledRun, job: JobStatus, live: list[JobStatus]) -> None:
        """Record the outcome of the attempt's submissions; a submission without an id counts as the adopted job."""
        open_ones = unresolved_submissions(self._submissions(view))
        adopted = [one for one in open_ones if one.job_id == job.job_id]
        adopted = adopted or [one for one in open_ones if one.job_id is None][:1]
        fate = {one.number: ADOPTED for one in adopted}
        duplicates = {other.job_id for other in live} - {job.job_id}
        fate |= {one.number: CANCELLED for one in open_ones if one.job_id in duplicates}
        for number, outcome in fate.items():
            self.store.note_submission(view.run.name, view.last.number, number, epoch=self.epoch, outcome=outcome)

    def release(self, run: Run, attempt: Attempt, folder: RunDir, config: RunConfig) -> None:
        """Write GO and release the job."""
        assert attempt.job_id is not None
        self.write_go(run, attempt, folder, config)
        self.renew_lease()
        job_id, place = attempt.job_id, folder.attempt(attempt.number)
        if not self._pauses.is_due(f"release {job_id}"):
            return
        release = self.schedulers[run.cluster].release
        self.in_folder(folder, lambda: release(job_id, place.submission), SUBMIT_WITHIN)
        self._pauses.start(f"release {job_id}")
        failpoints.reach("after_release")
        self.record_action(f"released job {attempt.job_id}")

    def write_go(self, run: Run, attempt: Attempt, folder: RunDir, config: RunConfig) -> None:
        """Write GO unless it is already in force. Rewriting a GO in force would fence the job."""
        assert attempt.job_id is not None
        place = folder.attempt(attempt.number)
        if not self.in_folder(folder, lambda: _in_force(place, attempt)):
            failpoints.reach("before_go")
            self.renew_lease()
            earlier = [past for past in self.store.attempts(run.name) if past.number < attempt.number]
            token = LaunchToken(
                attempt=attempt.number, epoch=self.epoch, job_id=attempt.job_id, nonce=attempt.nonce,
                config_digest=attempt.config_digest, restarts=attempt.restarts,
                **self._inheritable(run, earlier, attempt.number, folder, config),
                over=tuple(f"{past.number:03d}-{past.nonce}" for past in earlier),
                trained=any(past.last_step for past in earlier),
                mtbf=self._time_between_failures(run, config),
            )  # fmt: skip
            self.in_folder(folder, lambda: token.write(place.go))
            failpoints.reach("after_go")

    def _inheritable(
        self, run: Run, earlier: Sequence[Attempt], number: int, folder: RunDir, config: RunConfig
    ) -> dict[str, tuple[str, ...]]:
        """Return the lists of earlier attempts' checkpoints for the launch token. Raises TierUnread."""
        from orchestrator.run_dirs.inheritable_checkpoints import inheritable

        found = self.find_checkpoints(run, earlier, folder, config)
        listed = inheritable(found.seen, self.store.checkpoints(run.name), number, found.expected)
        return {"checkpoints": listed.checkpoints, "perhaps": listed.perhaps, "corrupt": listed.corrupt}

    def find_checkpoints(
        self, run: Run, earlier: Sequence[Attempt], folder: RunDir, config: RunConfig
    ) -> "RunCheckpoints":
        """Return earlier attempts' checkpoints in shared tiers. Raises TierUnread if the newest may be unreadable."""
        from orchestrator.run_dirs import inheritable_checkpoints  # imports fsspec, which only a launch needs

        rows, copies, look = self.store.checkpoints(run.name), self.store.copies(run.name), inheritable_checkpoints
        found = self.in_folder(
            folder, lambda: look.find_checkpoints(config.checkpoint, folder, run, earlier, rows, copies), SUBMIT_WITHIN
        )
        if found.newest_is_unread:
            path, error = next(iter(found.unread.items()))
            give_up = f"; to continue from an older checkpoint: mkdir -p {shlex.quote(path)}"
            hint = f"give this user access to it, or mount it{give_up * isinstance(error, FileNotFoundError)}"
            what = f"{FailureKind.STORAGE}: the newest checkpoint may be in a tier that cannot be read from here"
            raise TierUnread(what, where=f"{path}: {error.strerror or error}", hint=hint) from error
        return found

    def _time_between_failures(self, run: Run, config: RunConfig) -> float:
        now = self.clock.wall()
        attempts, failed_generations = self.store.history(run.domain, now - failure_rate.WINDOW)
        cluster, own = failure_rate.count_failures(attempts, failed_generations, now, run.name)
        days = config.checkpoint.auto.node_days
        return failure_rate.time_between_failures(config.cluster.nodes, node_days=days, cluster=cluster, run=own)

    # -- notes

    def note(self, run: Run, reason: str) -> None:
        """Record a human-readable reason for the run's state."""
        if reason and self.store.run(run.name).reason != reason:
            self.store.note_run(run.name, **self.stamp(), reason=reason)

    # -- fences and cancellation

    def fence(self, place: AttemptDir) -> None:
        """Fence an attempt: any of its processes that reads GO from now on must neither commit nor delete."""
        folder = RunDir(place.path.parent.parent)
        if self.in_folder(folder, lambda: not place.path.is_dir() or is_revoked(place.go)):
            return
        failpoints.reach("before_revoke")
        self.renew_lease()
        self.in_folder(folder, lambda: revoke(place.go))
        failpoints.reach("after_revoke")

    def cancel(self, run: Run, job_id: str, reason: str) -> None:
        """Cancel a job. Repeated calls are harmless, because Slurm is asked only at intervals while the job remains."""
        if not self._pauses.is_due(f"cancel {job_id}"):
            return
        self.renew_lease()
        self.schedulers[run.cluster].cancel(job_id)
        self._pauses.start(f"cancel {job_id}")
        failpoints.reach("after_cancel")
        self.record_action(f"cancelled job {job_id} of {run.name}: {reason}")

    def cancel_orphan(self, run: Run, owner: JobRecord, job_id: str, reason: str) -> None:
        """Cancel a job that was submitted for an attempt but not adopted, and record its submission as cancelled."""
        self.cancel(run, job_id, reason)
        for one in unresolved_submissions(owner.submissions):
            if one.job_id == job_id:
                self.store.note_submission(one.run, one.attempt, one.number, epoch=self.epoch, outcome=CANCELLED)

    def request_once(
        self, folder: RunDir, kind: RequestKind, attempt: int, reason: str, value: float | None, detail: str = ""
    ) -> bool:
        """Send an attempt a request at most once per kind and value; return whether this call sent it."""
        if self.in_folder(folder, lambda: _is_asked(folder, kind, attempt, value)):
            return False
        self.renew_lease()
        request = Request(kind=kind, attempt=attempt, reason=reason, value=value, detail=detail)
        self.in_folder(folder, lambda: folder.requests.mkdir(mode=0o700, exist_ok=True))
        self.in_folder(folder, lambda: request.write(folder.requests))
        self.record_action(f"asked {folder.name}/{attempt} to {kind}: {reason}")
        return True


@contextmanager
def ignored_disk_errors() -> Iterator[None]:
    """Ignore a failure to write a request if the cause is a full or broken disk."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise


def _search_note(ids: Sequence[str]) -> str:
    seen = f"sbatch gave job id {', '.join(ids)}" if ids else "sbatch gave no job id"
    return f"waits for its job to be found: {seen}, and Slurm does not list it yet"


def _is_asked(folder: RunDir, kind: RequestKind, attempt: int, value: float | None) -> bool:
    """Return whether the newest request of this kind has this value; times within `SAME_TIME_S` count as equal."""
    asked = [request for request in pending(folder.requests, attempt, set()) if request.kind is kind]
    if not asked or value is None:
        return bool(asked)
    last = asked[-1].value
    return last is not None and abs(last - value) < SAME_TIME_S


def _in_force(place: AttemptDir, attempt: Attempt) -> bool:
    try:
        token = LaunchToken.read(place.go)
    except (OSError, ValueError, TypeError, KeyError):
        return False
    held = (token.job_id, token.restarts, token.attempt, token.nonce)
    return held == (attempt.job_id, attempt.restarts, attempt.number, attempt.nonce)
