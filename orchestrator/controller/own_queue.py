"""Order of a user's pending runs by their priority: among jobs in Slurm's queue, and in the order of launches."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.observed_since import ObservedSince
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler.interface import JobStatus
from orchestrator.scheduler.slurm.own_order import WantedOrder

PRIORITY = "priority"  # key of a run's identity, and the verb of a request to change it
NORMAL = 0
OrderJobs = Callable[[Mapping[str, WantedOrder]], list[str]]
"""Function that orders pending jobs, keyed by id, and returns what it has done."""
ASK_EVERY = 60.0  # seconds between questions while the pending jobs and their priorities stay the same
_KEY, _LOWERED = "own queue", "own queue lowered"


def run_priority(run: Run) -> int:
    """Return a run's priority among the user's own runs."""
    value = run.identity.get(PRIORITY, NORMAL)
    return value if isinstance(value, int) else NORMAL


def by_priority(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with the highest priority first, otherwise in their order."""
    return sorted(runs, key=lambda run: -run_priority(run))


def configured_nice(config: RunConfig) -> int:
    """Return the nice value of a run's sbatch options; sbatch takes `--nice` alone as 100."""
    value: Any = config.cluster.sbatch.get("nice", 0)
    return 100 if value is True else int(value) if str(value).lstrip("-").isdigit() else 0


def order_pending(
    runs: Iterable[tuple[Run, Attempt, JobStatus | None]],
    configs: Callable[[str], RunConfig],
    observed: ObservedSince,
    order: OrderJobs,
) -> list[str]:
    """Order the pending jobs if their priorities differ, or differed when this was last done."""
    pending = {
        job.job_id: (run, attempt)
        for run, attempt, job in runs
        if job is not None and job.job_id == attempt.job_id and job.state == "PENDING" and not job.held
    }
    differ = len({run_priority(run) for run, _ in pending.values()}) > 1
    lowered = set(observed.value(_LOWERED).split(","))
    if not (differ or lowered & set(pending)):
        return []
    state = ",".join(f"{job}={run_priority(run)}" for job, (run, _) in sorted(pending.items()))
    if 0.0 < observed.age(_KEY, state) < ASK_EVERY:
        return []
    observed.forget(_KEY)  # the next pause begins now
    observed.age(_KEY, state)
    wanted = {}
    for job, (run, attempt) in pending.items():
        with suppress(ValueError):  # a damaged config affects only its run
            nice = configured_nice(configs(attempt.config_digest or run.config_digest))
            wanted[job] = WantedOrder(rank=run_priority(run), nice=nice)
    done = order(wanted)
    observed.age(_LOWERED, ",".join(sorted(wanted)) if differ else "")
    return done
