"""Order of one user's pending jobs, through Slurm's nice values.

Ordinary users may only lower a job's priority. So a job with a lower rank gets just enough nice to come after the jobs
with a higher rank, and its own nice value back once none of these is pending.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.slurm.command_output import run_command
from trainer.protocol.cut_text import cut

ANSWER_WITHIN = 10.0
MOST_NICE = 2_147_483_645  # Slurm's limit
_FIELDS = ("JobID", "PriorityLong", "Nice", "Partition")
_FORMAT = ",".join(f"{name}:{width}|" for name, width in zip(_FIELDS, (64, 24, 16, 256), strict=True))
_ROW = re.compile(r" *(\d+) *\|(\d+) *\|(-?\d+) *\|(\S+) *\|")
log = logging.getLogger("orch.controller")


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A pending job as Slurm lists it."""

    job_id: str
    partition: str
    priority: int
    nice: int


@dataclass(frozen=True, kw_only=True)
class WantedOrder:
    """A job's rank among the user's jobs (higher ones go first), and the nice value of its configuration."""

    rank: int
    nice: int = 0


def read_pending(text: str) -> list[PendingJob]:
    """Return the jobs in squeue's answer; unreadable rows are skipped."""
    rows = (_ROW.match(line) for line in text.splitlines())
    return [
        PendingJob(job_id=row[1], priority=int(row[2]), nice=int(row[3]), partition=row[4]) for row in rows if row
    ]  # fmt: skip


def plan_nice(jobs: Sequence[PendingJob], wanted: Mapping[str, WantedOrder]) -> dict[str, int]:
    """Return the nice values to change, keyed by job id. Only jobs of one partition are ordered among themselves."""
    changes: dict[str, int] = {}
    for partition in {job.partition for job in jobs}:
        mine = [job for job in jobs if job.partition == partition and job.job_id in wanted and job.priority > 0]
        ceiling: int | None = None  # lowest priority of the jobs with a higher rank
        for rank in sorted({wanted[job.job_id].rank for job in mine}, reverse=True):
            reached = []
            for job in (job for job in mine if wanted[job.job_id].rank == rank):
                nice = _nice(job, wanted[job.job_id].nice, ceiling)
                if nice != job.nice:
                    changes[job.job_id] = nice
                reached.append(max(1, job.priority + job.nice - nice))
            ceiling = min(reached) if ceiling is None else min(ceiling, *reached)
    return changes


def _nice(job: PendingJob, own: int, ceiling: int | None) -> int:
    """Return the nice value that keeps a job below `ceiling`; its own if that is enough, or if nothing can be lower."""
    natural = job.priority + job.nice - own  # its priority with its own nice value
    if ceiling is None or ceiling <= 1 or natural < ceiling:
        return own
    # Priorities drift with age. A job that is already below keeps its nice value.
    return job.nice if job.priority < ceiling else min(MOST_NICE, own + natural - ceiling + 1)


class OwnOrder:
    """Orders this user's pending jobs; remembers what Slurm refused."""

    def __init__(self, run: Callable[[list[str]], tuple[int, str, str]] | None = None) -> None:
        self._run = run or _run
        self._refused: dict[str, int] = {}

    def __call__(self, wanted: Mapping[str, WantedOrder]) -> list[str]:
        """Change nice values where the order requires it, and return what was done. Raises SlurmUnreachable."""
        ids = ",".join(sorted(wanted))
        code, listed, _ = self._run(["squeue", "-h", "-a", "--me", "-t", "PD", "-j", ids, "-O", _FORMAT])
        plan = plan_nice(read_pending(listed), wanted) if code == 0 else {}
        done = []
        for nice in sorted({value for job, value in plan.items() if self._refused.get(job) != value}):
            jobs = sorted(job for job, value in plan.items() if value == nice)
            code, _, error = self._run(["scontrol", "update", f"JobId={','.join(jobs)}", f"Nice={nice}"])
            if code:
                self._refused |= dict.fromkeys(jobs, nice)
                log.warning(
                    "Slurm refuses nice %s for %s: %s", nice, ", ".join(jobs), cut(" ".join(error.split()), 200)
                )
            else:
                done.append(f"nice {nice} for job {', '.join(jobs)}")
        return done


def _run(command: list[str]) -> tuple[int, str, str]:
    done = run_command(command, ANSWER_WITHIN)
    return done.returncode, done.stdout, done.stderr


def order_quietly(order: OwnOrder, wanted: Mapping[str, WantedOrder]) -> list[str]:
    """Order the jobs; an unanswered question is logged, and the next pass asks again."""
    try:
        return order(wanted)
    except SlurmUnreachable as error:
        log.warning("pending jobs could not be ordered: %s", error.what)
        return []
