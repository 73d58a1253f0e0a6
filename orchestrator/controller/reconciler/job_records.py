"""What is written down about the jobs of attempts: by what a pass knows a job again, and asks for it."""

from collections.abc import Mapping

from orchestrator.controller.jobs.job_identity import JobRecord
from orchestrator.controller.jobs.scheduler_snapshot import Records
from orchestrator.controller.jobs.submission_limits import ORPHANS_FOR, unresolved
from orchestrator.controller.reconciler.ownership import Domain
from orchestrator.registry.records import Attempt, Submission
from orchestrator.registry.store import Store
from orchestrator.states import LIVE_ATTEMPTS


def job_records(store: Store, domain: Domain, attempts: Mapping[str, tuple[Attempt, ...]], now: float) -> Records:
    """The records of all attempts of these runs, and of runs of this domain with submissions that nobody has found."""
    made: dict[str, list[Submission]] = {}
    for one in store.submissions(since=now - ORPHANS_FOR):
        made.setdefault(one.run, []).append(one)
    runs = {name: store.run(name) for name in {*attempts, *made}}
    # An id means nothing to another Slurm than the one that gave it.
    orphaned = [name for name, several in made.items() if name not in attempts and unresolved(several)]
    known = {**attempts, **{name: tuple(store.attempts(name)) for name in orphaned if domain.has(runs[name])}}
    return {
        (name, attempt.number): JobRecord.of(runs[name], attempt, made.get(name, ()))
        for name, several in known.items()
        for attempt in several
    }


def wanted_ids(attempt: Attempt, record: JobRecord) -> list[str]:
    """Ids under which the attempt's job is asked for: the adopted one, else those that sbatch has answered."""
    if attempt.state not in LIVE_ATTEMPTS:
        return []
    if attempt.job_id is not None:
        return [attempt.job_id]
    return [one.job_id for one in unresolved(record.submissions) if one.job_id]
