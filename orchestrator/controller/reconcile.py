"""Level-triggered pass over all live runs: collect, classify, decide, act."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

from checkpointing.storage.storage_errors import explain_disk_error
from orchestrator import failpoints
from orchestrator.controller import user_requests
from orchestrator.controller.actor import SUBMIT_WITHIN, Actor, PoolSize, UsableNodes, training_notes
from orchestrator.controller.collect_evidence import collect_evidence
from orchestrator.controller.conclude import conclude
from orchestrator.controller.expected_start import changed_fields
from orchestrator.controller.may_start import RunWait, find_predecessors, record_wait, waiting_runs
from orchestrator.controller.nodes_to_avoid import to_avoid
from orchestrator.controller.own_queue import OrderJobs, by_priority, order_pending
from orchestrator.controller.ownership import Domain, never_submitted, sweep_orphans
from orchestrator.controller.requeued_jobs import (
    adopt_requeued,
    end_requeued,
    is_ended_by_orch,
    launch_requeued,
    why_not_continued,
)
from orchestrator.controller.run_signs import HAS_JOB, has_news
from orchestrator.controller.running_jobs import (
    end_judged_job,
    end_silent_job,
    give_up_long_wait,
    is_held_by_person,
    maintain_job,
    next_world,
    size_note,
    update_exclusions,
    wait_for_room,
    wait_for_tiers,
    with_exclusions,
)
from orchestrator.controller.scheduler_queries import LiveRuns, SchedulerQueries
from orchestrator.controller.scheduler_snapshot import SchedulerSnapshot, changes
from orchestrator.errors import Fenced, ForeignRun, Precondition, RegistryError, SlurmUnreachable
from orchestrator.observed_since import Clock, ObservedSince
from orchestrator.recovery.classify_failure import LEAVING_LIMIT, Evidence, judge, judge_silence
from orchestrator.registry.records import Attempt, Lease, Run, UserRequest
from orchestrator.registry.store import Store
from orchestrator.run_dirs.bounded_files import DirectFiles, Files, RunDirHangs
from orchestrator.run_dirs.controlled_run import ControlledRun, RunConfigs, stored_config
from orchestrator.run_dirs.ingest import ingest
from orchestrator.run_dirs.job_spec import is_live, job_spec
from orchestrator.run_dirs.other_registry import refuse_other_registry
from orchestrator.run_dirs.run_folder import check_run_folder, ensure_run_dir
from orchestrator.scheduler.interface import (
    LEAVING_STATES,
    RUNNING_STATES,
    JobStatus,
    Scheduler,
)
from orchestrator.scheduler.scheduler_instance import KEEP_FOR, Instance
from orchestrator.scheduler.slurm.refusals import waiting_words
from orchestrator.states import LIVE_ATTEMPTS, LIVE_RUNS, AttemptState, RunState
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.failures.decision import Action
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class TickReport:
    """Result of one pass; `errors` names runs that could not be served.

    `unreachable` names the kinds of schedulers that failed to answer at some point; `silence` holds their messages.
    """

    live: int
    changed: bool
    actions: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    silence: tuple[str, ...] = ()

    def plus(self, other: "TickReport") -> "TickReport":
        """Return the sum of both reports."""
        return TickReport(
            live=self.live + other.live, changed=self.changed or other.changed, actions=self.actions + other.actions,
            errors=self.errors + other.errors, unreachable=self.unreachable + other.unreachable,
            silence=self.silence + other.silence,
        )  # fmt: skip


log = logging.getLogger("orch.controller")


class Controller:
    """Reconciler that advances every live run. It keeps no state that a successor would need."""

    def __init__(
        self,
        store: Store,
        schedulers: Mapping[str, Scheduler],
        *,
        clock: Clock | None = None,
        observed: ObservedSince | None = None,
        pool_size: PoolSize = lambda config: None,
        usable_nodes: UsableNodes = lambda asked, without: None,
        files: Files | None = None,
        instance: Instance | None = None,
    ) -> None:
        self.store, self.schedulers, self.rng = store, schedulers, Random()
        self.clock = clock or Clock()
        self.observed = observed or ObservedSince(self.clock.mono)
        self.actor = Actor(store, schedulers, self.clock, self.observed)
        self.domain = Domain(self.actor, instance)
        self.actor.pool_size, self.actor.usable_nodes = pool_size, usable_nodes
        self.order_jobs: OrderJobs = lambda wanted: []
        self.files = self.actor.files = files or DirectFiles()
        self.configs = RunConfigs(store)
        self._errors: list[str] = []
        self._silent: dict[str, str] = {}
        self._cancels: dict[str, UserRequest] = {}
        self._waits: dict[str, RunWait] = {}
        self.queries = SchedulerQueries(self.actor, self.domain)

    def tick(self, lease: Lease) -> TickReport:
        """Run one pass. Raises Fenced if the lease is lost, RegistryError if the registry is unusable."""
        self.actor.start_pass(lease)
        self.actor.renew_lease(checked_within=KEEP_FOR)
        user_requests.answer_idle(self.actor)
        live = self.store.runs(LIVE_RUNS)
        self._errors, self._silent = [], self.domain.silent_schedulers(live)
        self._cancels = user_requests.pending_cancels(self.store)
        runs = self.domain.runs_to_look_up(live)
        attempts = self.store.attempts_by_run(run.name for run in runs)
        self._waits = waiting_runs(live, attempts, find_predecessors(self.store, runs), self._cancels)
        records = self.domain.job_records(runs, attempts, self.clock.wall())
        snapshots = {
            kind: self.queries.ask(kind, LiveRuns(runs, attempts, records, self._cancels, self._waits.keys()))
            for kind in sorted({run.cluster for run in runs})
        }
        self._silent |= {kind: why for kind, why in self.queries.silent.items() if kind in snapshots}
        fresh = [self._serve(run, attempts[run.name], snapshots[run.cluster]) for run in by_priority(runs)]
        self._order_pending(runs, attempts, snapshots)
        for kind, snapshot in snapshots.items():
            sweep_orphans(self.actor, self.domain, kind, snapshot)
        if self.actor.actions:
            self.queries.note_action()
        self.store.note_tick(self.actor.lease, self.clock.wall())
        self.observed.save()
        return TickReport(
            live=self.domain.count(),
            changed=any(fresh) or bool(self.actor.actions),
            actions=tuple(self.actor.actions),
            errors=tuple(self._errors),
            unreachable=tuple(sorted(self._silent)),
            silence=tuple(words for _, words in sorted(self._silent.items())),
        )

    def news(self) -> tuple[object, ...]:
        """Return the state that is visible without a scheduler. If it changes, a pass is due."""
        runs = self.domain.live()
        seen = tuple(self._has_news(RunDir(Path(run.run_dir))) for run in runs)
        return tuple(request.id for request in self.store.user_requests()), tuple(run.name for run in runs), seen

    def _has_news(self, folder: RunDir) -> tuple[bool, bool]:
        with suppress(OSError, RunDirHangs):
            return self.actor.in_folder(folder, lambda: has_news(folder))
        return False, False

    def _order_pending(
        self, runs: list[Run], attempts: Mapping[str, tuple[Attempt, ...]], snapshots: Mapping[str, SchedulerSnapshot]
    ) -> None:  # fmt: skip
        rows = [
            (run, last, snapshots[run.cluster].adopted_job(last))
            for run in runs
            for last in attempts[run.name][-1:]
            if not traits(run.cluster).simulated_nodes
        ]
        for done in order_pending(rows, self.configs, self.observed, self.order_jobs):
            self.actor.record_action(done)

    # -- one run

    def _serve(self, run: Run, attempts: tuple[Attempt, ...], snapshot: SchedulerSnapshot) -> bool:
        """Serve one run; its errors are recorded and do not affect other runs."""
        self.actor.renew_lease_if_due()
        try:
            if not snapshot.answered and user_requests.cancel_unsubmitted(self.actor, run, self._cancels.get(run.name)):
                return True
            if not snapshot.asked:
                return self._serve_from_files(run, attempts)
            owned, reason = self.domain.owns(run, attempts, snapshot)
            if not owned:
                self.actor.note(run, reason)
                return False
            view = self._view(run, attempts)
            return self._advance(view if self.domain.has(run) else self._reload_view(view), snapshot)
        except ForeignRun as error:
            log.warning("%s", error.what)  # another scheduler's controller has just taken it over
        except (Fenced, RegistryError):
            raise
        except SlurmUnreachable as error:
            self._silent.setdefault(run.cluster, error.what)
            self.actor.note(run, f"{run.cluster} does not answer, so nothing is assumed: {error.what}")
        except RunDirHangs as error:
            self._errors.append(f"{run.name}: {error.what}")
            self.actor.note(run, f"{error.what}; its job is left alone and will be looked up again")
            self._cancel_without_folder(run, attempts, snapshot)
        except Precondition as error:
            self._hold(run, error)
        except Exception as error:  # outermost edge: an error in one run must not stop the others
            if disk := explain_disk_error(error, Path(run.run_dir)):
                self.actor.note(run, f"{FailureKind.STORAGE}: {disk}; retrying until it works")
                return False
            log.exception("run %s", run.name)
            self._errors.append(f"{run.name}: {type(error).__name__}: {error}")
            self.actor.note(run, f"the controller cannot serve this run: {type(error).__name__}: {error}")
        return False

    def _serve_from_files(self, run: Run, attempts: tuple[Attempt, ...]) -> bool:
        """Ingest what a run's job has written, without its scheduler; return whether there was anything new."""
        if (wait := self._waits.get(run.name)) is not None and self.domain.has(run):
            return record_wait(self.actor, run, wait)
        view = self._view(run, attempts)
        if view.last.state not in HAS_JOB or not self.domain.has(run) or self._is_hidden(view):
            return False
        return ingest(self.store, view, **self.actor.stamp(), files=self.files)

    def _cancel_without_folder(self, run: Run, attempts: tuple[Attempt, ...], snapshot: SchedulerSnapshot) -> None:
        """Cancel a run's job without using its files. The run itself is cancelled once its directory answers again."""
        view = self._view(run, attempts)
        if view.cancel is not None and view.last.state in LIVE_ATTEMPTS and snapshot.for_attempt(view.last).answered:
            with suppress(RunDirHangs, SlurmUnreachable):
                user_requests.advance_cancel(self.actor, view, snapshot)

    def _view(self, run: Run, attempts: tuple[Attempt, ...]) -> ControlledRun:
        """Return the run with the config in effect: a live attempt has its own, which may be for a smaller world."""
        last = attempts[-1]
        digest = (last.config_digest if last.state in LIVE_ATTEMPTS else "") or run.config_digest
        cancel = self._cancels.get(run.name)
        return ControlledRun(run=run, attempts=attempts, config=self.configs(digest), cancel=cancel)

    def _reload_view(self, view: ControlledRun) -> ControlledRun:
        return self._view(self.store.run(view.run.name), tuple(self.store.attempts(view.run.name)))

    def _advance(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
        if view.last.state in LIVE_ATTEMPTS:
            snapshot = snapshot.for_attempt(view.last)
        if not snapshot.answered:
            self.actor.note(view.run, f"{view.run.cluster} does not answer, so nothing is assumed: {snapshot.error}")
        if view.last.state is AttemptState.INTENT:
            return self._intent(view, snapshot)
        if view.last.state in LIVE_ATTEMPTS:
            return self._follow(view, snapshot)
        return self._next(view, snapshot)

    def _intent(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
        # This comes first because a run whose folder cannot be created must still be cancellable.
        if view.cancel is not None:
            if user_requests.cancel_intent(self.actor, view, snapshot):
                user_requests.end_cancelled(self.actor, view)
            return True
        if never_submitted(view.attempts):
            data = stored_config(self.store, view.attempts[0].config_digest or view.run.config_digest)
            self.actor.in_folder(view.folder, lambda: ensure_run_dir(view.run, view.attempts[0], data), SUBMIT_WITHIN)
        elif self._is_hidden(view):
            return False
        if view.last.submitted_at is None:
            if (wait := self._waits.get(view.run.name)) is not None:
                return record_wait(self.actor, view.run, wait)
            self._refuse_other_registry(view)
            if wait_for_room(self.actor, view):
                return False
            view = with_exclusions(self.actor, view)
        failure = self.actor.launch(view, snapshot)
        if failure is not None:
            conclude(self.actor, view, (AttemptState.ENDED, failure.reason, failure), self.rng)
        return False

    def _is_hidden(self, view: ControlledRun) -> bool:
        """Return whether a submitted run's folder is invisible; its state is then unknown, and it is never recreated.

        Durations measured from its files start again once the folder is back.
        """
        why = self.actor.in_folder(view.folder, lambda: check_run_folder(view.run, view.attempts[0]))
        if not why:
            return False
        for what in ("gone", "ended", "beat"):
            self.observed.forget(f"{what}:{view.run.name}/{view.last.number}")
        self.actor.note(view.run, f"{why}; nothing is assumed until this is resolved")
        return True

    def _refuse_other_registry(self, view: ControlledRun) -> None:
        self.actor.in_folder(view.folder, lambda: refuse_other_registry(view.run, view.attempts, self.store.path))

    def _follow(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
        if self._is_hidden(view):
            return view.cancel is not None and user_requests.cancel_without_folder(self.actor, view, snapshot)
        # A controller that was suspended in the middle of a launch may have rewritten an old GO.
        for attempt in view.attempts[-3:-1]:
            self.actor.fence(view.folder.attempt(attempt.number))
        fresh = ingest(self.store, view, **self.actor.stamp(), files=self.files)
        evidence = collect_evidence(view, snapshot, self.observed, self.files)
        job = evidence.job
        if job is not None and is_live(job):
            self._note_job(view, job, evidence)
            maintain_job(self.actor, view, job)
            update_exclusions(self.actor, view, job)
            end_silent_job(self.actor, view, job, evidence)
            full = self.configs(view.run.config_digest)
            give_up_long_wait(self.actor, view, full, job, evidence)
        if view.cancel is not None:
            user_requests.advance_cancel(self.actor, view, snapshot)
        verdict = judge(evidence)
        if verdict[0] is AttemptState.RUNNING:
            if evidence.requeued_job is not None:
                self.actor.note(view.run, verdict[1])
            return fresh
        lost = view.last.job_id
        if verdict[0] is AttemptState.LOST and lost is not None and lost not in snapshot.polled:
            # The job list may have omitted this job by mistake, and it must not run alongside its successor.
            end_judged_job(self.actor, view, lost, "Slurm no longer lists it")
        if job is not None and is_live(job) and not evidence.job_leaving:
            # If the run ends with this attempt, nothing will check the job again.
            end_judged_job(self.actor, view, job.job_id, verdict[1])
        # Ingest what the job wrote last.
        ingest(self.store, view, **self.actor.stamp(), files=self.files)
        decision = conclude(self.actor, self._reload_view(view), verdict, self.rng, evidence.gone)
        if evidence.requeued_job is not None and decision.action is not Action.RETRY:
            end_requeued(self.actor, view, evidence.requeued_job, decision.reason)
        return True

    def _note_job(self, view: ControlledRun, job: JobStatus, evidence: Evidence) -> None:
        """Record the job's state in Slurm, and the resulting states of the attempt and the run."""
        run, attempt = view.run, view.last
        runs = job.state in RUNNING_STATES and not job.held
        if runs and attempt.state is AttemptState.SUBMITTED:
            reason = f"job {job.job_id} is {job.state}"

            def running() -> None:
                known: dict[str, Any] = {"nodes": job.nodes} if job.nodes else {}
                started = attempt.started_at or self.clock.wall()
                self.store.move_attempt(
                    run.name, attempt.number, AttemptState.RUNNING, reason, **self.actor.stamp(), job_state=job.state,
                    started_at=started, **known,
                )  # fmt: skip
                self.store.move_run(run.name, RunState.RUNNING, reason, **self.actor.stamp())

            self.store.together(running)
            self.actor.record_action(f"{run.name}/{attempt.number}: {reason}")
        elif changed := changed_fields(attempt, job, self.clock.wall()):
            self.store.note_attempt(run.name, attempt.number, epoch=self.actor.epoch, **changed)
        if job.sluid and not attempt.sluid and job.restarts == attempt.restarts:
            self.store.note_attempt(run.name, attempt.number, epoch=self.actor.epoch, sluid=job.sluid)
        _, silence = judge_silence(evidence, view.config.detection.hang.heartbeat)
        spec = job_spec(run, attempt, view.config)
        reason_for = self.actor.observed.age(f"reason:{run.name}/{attempt.number}", job.reason)
        waits = waiting_words(job.reason, spec.resources, run.name, reason_for) if not runs else ""
        figures = self.actor.describe_wait(job, spec.resources, reason_for) if waits else ""
        altered = "" if attempt.restarts else changes(job, spec)
        held = f"a user holds it: `scontrol release {job.job_id}`" if is_held_by_person(self.actor, view, job) else ""
        size = size_note(view, self.configs(run.config_digest), job)
        notes = training_notes(self.store, attempt) if runs else []
        texts = (figures, size, held, silence, evidence.odd, altered, *notes)
        notes_text = "".join(f"; {words}" for words in texts if words)
        troubles = (evidence.saves_failing, evidence.waits, evidence.unsaved)
        urgent = "".join(f"{words}; " for words in troubles if words and runs)
        self.actor.note(run, f"{urgent}job {job.job_id} is {job.state}{waits}{notes_text}")

    def _next(self, view: ControlledRun, snapshot: SchedulerSnapshot) -> bool:
        """Start the next attempt of a run without a live attempt, once nothing delays it."""
        run = view.run
        requeued = snapshot.requeued_job(run, view.last)
        if requeued is not None and (why := why_not_continued(view, requeued)):
            end_requeued(self.actor, view, requeued, why)
            requeued = None
        elif requeued is None and (cancelled := snapshot.cancelled_requeue(view.last)) is not None:
            # The attempt that adopts the job records that somebody else cancelled it.
            requeued = None if is_ended_by_orch(self.actor, view) else cancelled
        blockers = [job for job in snapshot.of_run(run) if job is not requeued and not self._is_stuck(job)]
        if view.cancel is not None and snapshot.swept and not blockers:
            user_requests.mark_cancelled(self.actor, view)
            return True
        # A pause never exceeds `backoff_max`; if more is left, the clock was set back.
        waits = 0.0 < run.not_before - self.clock.wall() <= view.config.recovery.backoff_max
        if view.cancel is None and waits and snapshot.answered and view.last.decision:
            self.actor.note(run, view.last.decision["reason"])  # restores the reason for the pause after other notes
        if view.cancel is not None or waits or not snapshot.swept:
            return False
        if blockers:
            self.actor.note(run, f"waits until job {blockers[0].job_id} has left the queue ({blockers[0].state})")
            return False
        if self._is_hidden(view):
            return False
        self._refuse_other_registry(view)
        # From here on, no process of an older attempt may commit or delete.
        for attempt in view.attempts:
            self.actor.fence(view.folder.attempt(attempt.number))
        if wait_for_room(self.actor, view):
            return False
        waits, without = wait_for_tiers(self.actor, view)
        if waits:
            return False
        if requeued is not None:
            adopt_requeued(self.actor, view, requeued)
            launch_requeued(self.actor, self._reload_view(view))
            return True
        failpoints.reach("before_next_intent")
        avoid = to_avoid(self.actor, view)
        changes = next_world(self.actor, view)
        if without:
            changes["reason"] = f"{changes.get('reason', 'next attempt')}; {without}"
        attempt = self.store.add_attempt(run.name, nonce=token_hex(4), excluded=avoid, **changes, **self.actor.stamp())
        failpoints.reach("after_next_intent")
        self.actor.make_attempt_dir(view, attempt)
        self.actor.record_action(f"{run.name}: attempt {attempt.number}")
        return self._intent(self._reload_view(view), snapshot)

    def _is_stuck(self, job: JobStatus) -> bool:
        """Return whether a job is stuck in COMPLETING, so that only the fence protects the run from it."""
        if job.state not in LEAVING_STATES:
            self.observed.forget(f"stuck:{job.job_id}")
            return False
        return self.observed.age(f"stuck:{job.job_id}", job.name) >= LEAVING_LIMIT

    # -- notes

    def _hold(self, run: Run, error: Precondition) -> None:
        reason = "; ".join(part for part in (error.what, error.where, error.hint) if part)
        # After a file system error, no `orch resume` is needed.
        if isinstance(error.__cause__, OSError):
            self.actor.note(run, f"{reason}; retrying until it works")
            return
        last = self.store.attempts(run.name)[-1]
        # A held run's job is not followed, so a run that may have a job is not held.
        if last.state in LIVE_ATTEMPTS and last.submitted_at is not None:
            self._errors.append(f"{run.name}: {reason}")
            self.actor.note(run, f"{reason}; its job is still being followed")
            return
        reason = f"{reason}; when it is fixed: orch resume {run.name}"
        self.store.move_run(run.name, RunState.HELD, reason, **self.actor.stamp())
        self.actor.record_action(f"{run.name} held: {reason}")
