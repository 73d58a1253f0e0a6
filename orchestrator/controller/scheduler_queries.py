"""The controller's queries of its schedulers: which jobs it asks for, and when it searches for them by name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random

from orchestrator.controller.actor import Actor
from orchestrator.controller.ownership import Domain
from orchestrator.controller.query_schedule import QuerySchedule, Signs
from orchestrator.controller.run_signs import HAS_JOB, read_signs
from orchestrator.controller.scheduler_snapshot import UNREACHABLE, Records, SchedulerSnapshot, take_snapshot
from orchestrator.controller.submission_limits import HOUR, unresolved_submissions
from orchestrator.registry.records import Attempt, Run, UserRequest
from orchestrator.run_dirs.job_spec import is_live
from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, UNREADABLE

SWEEP_EVERY, SWEEP_RARELY = 30.0, 1800.0
"""Seconds between searches by name while a submission's outcome or a run's owner is open, and otherwise."""
LATE = 20.0  # seconds after a submission at which a duplicate of its job is searched for once
SEARCH_CALLS = 3  # maximum number of a scheduler's commands for a search by name
NOT_ASKED = replace(UNREACHABLE, asked=False, error="")
"""Snapshot of a pass that does not query the scheduler."""
_UNSETTLED = LEAVING_STATES | ENDED_STATES | {UNREADABLE}


@dataclass(frozen=True)
class LiveRuns:
    """The live runs of one pass, with their attempts, the records of their jobs and requests to cancel them.

    `waiting`: runs that have certainly no job, because they wait for other runs.
    """

    runs: list[Run]
    attempts: Mapping[str, tuple[Attempt, ...]]
    records: Records
    cancels: Mapping[str, UserRequest]
    waiting: Collection[str] = ()

    def select(self, kind: str) -> "LiveRuns":
        """Return the runs on one kind of scheduler."""
        return replace(self, runs=[run for run in self.runs if run.cluster == kind])

    def last(self, run: Run) -> Attempt:
        return self.attempts[run.name][-1]

    @property
    def begun(self) -> list[Run]:
        """The runs that may have a job."""
        return [run for run in self.runs if run.name not in self.waiting]


class SchedulerQueries:
    """Queries of one controller.

    `quiet`: seconds between queries of a scheduler while nothing changes; 0: every pass queries it. `silent`: why a
    kind of scheduler has not answered the last query.
    """

    def __init__(self, actor: Actor, domain: Domain) -> None:
        self._actor, self._domain, self._rng = actor, domain, Random()
        self.quiet = 0.0
        self.silent: dict[str, str] = {}
        self._schedules: dict[str, QuerySchedule] = {}
        self._swept_at: dict[str, float] = {}
        self._unsettled: dict[str, frozenset[str]] = {}  # runs whose jobs were missing, leaving or ended, by kind

    def seconds_left(self) -> float:
        """Return the seconds until a pass queries a scheduler, if nothing happens before."""
        return min((one.seconds_left() for one in self._schedules.values() if self.quiet), default=float("inf"))

    def note_action(self) -> None:
        """Record that the controller has changed something, so that the next queries are due soon."""
        for schedule in self._schedules.values():
            schedule.note_action()

    def forget_schedules(self) -> None:
        """Query all schedulers in the next pass."""
        self._schedules.clear()

    def ask(self, kind: str, live: LiveRuns) -> SchedulerSnapshot:
        """Return the scheduler's answers about these runs if it is time to query it, else NOT_ASKED."""
        live, mono = live.select(kind), self._actor.clock.mono
        schedule = self._schedules.setdefault(kind, QuerySchedule(mono, self._rng, quiet=self.quiet))
        if self.quiet and not schedule.is_due(self._read_signs(kind, live)):
            return NOT_ASKED
        began = mono()
        snapshot = self._query(kind, live)
        calls = max(1, bool(snapshot.polled) + SEARCH_CALLS * snapshot.swept)
        schedule.note_query(took=mono() - began, calls=calls, answered=snapshot.answered)
        self.silent.pop(kind, None)
        if not snapshot.answered:
            self.silent[kind] = snapshot.error
        return snapshot

    def _read_signs(self, kind: str, live: LiveRuns) -> Signs:
        unsettled = self._unsettled.get(kind, frozenset())
        seen = [
            read_signs(self._actor, run, live.last(run), live.cancels.get(run.name), unsettled) for run in live.begun
        ]
        return Signs(events=tuple(one.events for one in seen), unsettled=any(one.unsettled for one in seen))

    def _query(self, kind: str, live: LiveRuns) -> SchedulerSnapshot:
        if silence := self._domain.silence(kind):
            return replace(UNREACHABLE, error=silence)
        last = [live.last(run) for run in live.begun if self._domain.expects(run, live.attempts[run.name])]
        adopted = [attempt for attempt in last if attempt.state in HAS_JOB]
        due = self._is_sweep_due(kind, live)
        wanted = [
            job_id for attempt in last for job_id in live.records[attempt.run, attempt.number].wanted_ids(attempt)
        ]
        if due:  # accounting shows whom a run belongs to even after its job has ended
            strangers = [live.last(run) for run in live.runs if not self._domain.has(run)]
            wanted += [attempt.job_id for attempt in strangers if attempt.job_id is not None]
        self._actor.renew_lease_if_due()
        waiting = {run.name for run in live.runs if run.not_before > self._actor.clock.wall()} - set(live.cancels)

        def needs_search(attempt: Attempt, seen: SchedulerSnapshot) -> bool:
            if attempt.state not in HAS_JOB:
                return attempt.run not in waiting
            job = seen.adopted_job(attempt)
            return job is None or (attempt.run in live.cancels and not is_live(job))

        def sweep(seen: SchedulerSnapshot) -> bool:
            return due or any(needs_search(attempt, seen) for attempt in last)

        snapshot = take_snapshot(
            self._actor.schedulers[kind], live.records, wanted, sweep=sweep, between=self._actor.renew_lease_if_due
        )
        self._note_answer(kind, adopted, snapshot)
        return snapshot

    def _note_answer(self, kind: str, adopted: list[Attempt], snapshot: SchedulerSnapshot) -> None:
        if not snapshot.answered:
            return
        if snapshot.swept:
            self._swept_at[kind] = self._actor.clock.mono()
        jobs = {attempt.run: snapshot.adopted_job(attempt) for attempt in adopted}
        self._unsettled[kind] = frozenset(name for name, job in jobs.items() if job is None or job.state in _UNSETTLED)
        if None in jobs.values():  # these answers may be of another scheduler
            self._actor.renew_lease()

    def _is_sweep_due(self, kind: str, live: LiveRuns) -> bool:
        """Return whether to search the queue by name although no event requires it."""
        now, wall = self._actor.clock.mono(), self._actor.clock.wall()
        strangers = sorted(run.name for run in live.runs if not self._domain.has(run))
        submissions = [one for record in live.records.values() for one in record.submissions]
        is_open = any(wall - one.submitted_at < HOUR for one in unresolved_submissions(submissions)) or (
            strangers and self._actor.observed.age(f"strangers:{kind}", strangers) < HOUR
        )
        pause, swept = SWEEP_EVERY if is_open else SWEEP_RARELY, now - self._swept_at.get(kind, -SWEEP_RARELY)
        settled = wall - max((one.submitted_at for one in submissions), default=wall) - LATE
        return swept >= pause or 0.0 <= settled < swept
