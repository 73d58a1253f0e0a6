"""Limits on repeated submissions, refused jobs, and partition sizes."""

import re
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Retryable, SlurmUnreachable, SubmitRejected
from orchestrator.registry.records import Run, Submission
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.command_output import run_command
from orchestrator.scheduler.slurm.node_capacity import NodeCapacity, count_usable, known_nodes
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.time_spans import stored_moment

KEEP, KEEP_NODES = 600.0, 15.0  # seconds for which a partition size and a list of nodes stay cached
ANSWER_WITHIN = 10.0


class PartitionSizes:
    """Cache of node counts by partition; None if Slurm does not report one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int | None]] = {}

    def __call__(self, config: RunConfig) -> int | None:
        name, now = config.cluster.partition, time.monotonic()
        if name not in self._known or now - self._known[name][0] > KEEP:
            self._known[name] = (now, _ask(name))
        return self._known[name][1]


class NodesInService:
    """Count of nodes in service that could run a job, from a list of nodes that is kept for `KEEP_NODES` seconds."""

    def __init__(self) -> None:
        self._nodes: list[NodeCapacity] = []
        self._listed = float("-inf")

    def __call__(self, asked: Resources, without: frozenset[str]) -> int | None:
        """Return the count as `node_capacity.count_usable` does. Raises SlurmUnreachable."""
        if time.monotonic() - self._listed > KEEP_NODES:
            self._nodes, self._listed = known_nodes(), time.monotonic()
        return count_usable(asked, without, self._nodes)


def _ask(partition: str) -> int | None:
    try:
        # WARNING: sinfo refuses -a together with -p.
        done = run_command(["sinfo", "-h", "-a", "-o", "%D %P"], ANSWER_WITHIN)
    except SlurmUnreachable:
        return None
    return read_sizes(done.stdout, partition) if done.returncode == 0 else None


def read_sizes(text: str, partition: str) -> int | None:
    """Return the node count of `partition` from lines `count name`; if empty, of the default partition (marked by *).

    If several partitions are named (`gpu,gpu-long`), the largest counts, because they may share nodes and a job runs in
    only one of them.
    """
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        count, _, name = line.strip().partition(" ")
        if count.isdigit():
            sizes[name] = sizes.get(name, 0) + int(count)
    if partition:
        known = [sizes.get(name, sizes.get(f"{name}*")) for name in partition.split(",")]
        return max((size for size in known if size is not None), default=None)
    return next((size for name, size in sizes.items() if name.endswith("*")), None)


_KEY = re.compile(r"[a-z_]+(\.[a-z_-]+)+", re.ASCII)


def rejection_failure(run: Run, error: SubmitRejected | ConfigError, also: str = "", *, accepted: bool) -> Failure:
    """Return the failure for a rejected submission. `accepted`: Slurm has accepted a job of this run before."""
    retryable = error.retryable if isinstance(error, SubmitRejected) else Retryable.NEVER
    # A value that was accepted before is not a typo.
    passes = retryable is Retryable.YES or (retryable is Retryable.ONCE_ACCEPTED and accepted)
    cure = "" if passes or "restore_test" in run.identity else f"orch resume {run.name} {_change(error)}"
    return Failure(
        kind=FailureKind.SUBMIT_DEFERRED if passes else FailureKind.SUBMIT_REJECTED,
        reason="; ".join(filter(None, (error.what, error.hint, also, cure))),
    )


def _change(error: SubmitRejected | ConfigError) -> str:
    """Return the arguments to type after `orch resume RUN`."""
    if isinstance(error, SubmitRejected):
        return error.change or "KEY=VALUE"
    key = error.where if _KEY.fullmatch(error.where) else "KEY"
    return error.hint if error.hint.startswith(f"{key}=") and " " not in error.hint else f"{key}=VALUE"


MOST_FOR_ATTEMPT = 3  # maximum number of lost submissions of one attempt; then a person must investigate
MOST_IN_AN_HOUR = 20  # maximum number of lost submissions within `HOUR`, in all runs of the registry
HOUR = 3600.0
ORPHANS_FOR = 7 * 86400.0  # seconds for which a lost submission's job is searched for by its id

ADOPTED, REFUSED, CANCELLED = "adopted", "refused", "cancelled"  # outcomes of a submission


class SubmitStep(StrEnum):
    SUBMIT = "submit"
    WAIT = "wait"
    GIVE_UP = "give up"


def unresolved_submissions(submissions: Iterable[Submission]) -> list[Submission]:
    """Return the submissions whose outcome is unknown."""
    return [one for one in submissions if not one.outcome]


def submit_permission(
    attempt: Sequence[Submission], everyone: Sequence[Submission], now: float
) -> tuple[SubmitStep, str]:
    """Decide whether an attempt's job may be submitted now that none of its jobs can be found; return the reason too.

    `attempt`: its own submissions so far; `everyone`: submissions of all runs within the last HOUR.
    """
    lost = unresolved_submissions(attempt)
    # Otherwise a site that changes jobs beyond recognition would be flooded with jobs.
    if len(lost) >= MOST_FOR_ATTEMPT:
        return SubmitStep.GIVE_UP, _given_up(lost)
    recent = sorted(one.submitted_at for one in unresolved_submissions(everyone) if one.submitted_at > now - HOUR)
    if len(recent) >= MOST_IN_AN_HOUR:
        until = stored_moment(recent[len(recent) - MOST_IN_AN_HOUR] + HOUR)
        problem = f"{len(recent)} jobs that were submitted within the last hour cannot be found in Slurm"
        return SubmitStep.WAIT, f"waits until {until}: {problem}; `squeue --me` lists the jobs it has"
    return SubmitStep.SUBMIT, ""


def _given_up(lost: Sequence[Submission]) -> str:
    ids = [one.job_id for one in lost if one.job_id]
    times = ", ".join(stored_moment(one.submitted_at) for one in lost)
    seen = f"sbatch gave the job ids {', '.join(ids)}" if ids else "sbatch gave no job id"
    look = f"`scontrol show job {ids[-1]}`" if ids else "`squeue --me`"
    end = f"end any that remain with `scancel {' '.join(ids)}`" if ids else "end any that remain with scancel"
    return (
        f"the job was submitted {len(lost)} times ({times}) and cannot be found in Slurm; {seen}. "
        f"Check with {look} whether the site changes jobs, and {end}"
    )
