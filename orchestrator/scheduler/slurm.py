"""The Slurm scheduler: jobs are submitted held through submitit, and looked up through squeue and sacct."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler import payload
from orchestrator.scheduler.base import ENDED_STATES, LEAVING_STATES, JobSpec, JobStatus
from orchestrator.scheduler.commands import TIMEOUT_S, ask, unreachable
from orchestrator.scheduler.slurm_text import (
    SACCT_FORMAT,
    SEPARATOR,
    SQUEUE_FORMAT,
    Garbage,
    fold_nodes,
    join_resized,
    read_accounting,
    read_down_nodes,
    read_queue,
)

LOOK_BACK_DAYS = 14
"""How far `find` looks into accounting: longer than any controller is likely to be away."""

_NO_ACCOUNTING = "accounting storage is disabled"
_OVER = ENDED_STATES | LEAVING_STATES


class SlurmScheduler:
    """Scheduler on Slurm (see `base.Scheduler`); holds no state besides how to ask."""

    kind = "slurm"

    def __init__(self, *, entry: str = payload.AGENT, timeout: float = TIMEOUT_S) -> None:
        self._entry, self._timeout = entry, timeout

    def submit(self, spec: JobSpec) -> None:
        from orchestrator.scheduler import sbatch  # submitit: only where a job is submitted

        sbatch.submit(spec, self._entry)

    def find(self, name_prefix: str) -> list[JobStatus]:
        queued = [job for job in self._queue() if job.name.startswith(name_prefix)]
        try:
            recorded = self._accounting(["-S", f"now-{LOOK_BACK_DAYS}days"])
        except SlurmUnreachable:
            if queued:  # the queue has answered, and it knew
                return queued
            raise
        known = {(job.job_id, job.submit_time) for job in queued}
        matching = [job for job in recorded or () if job.name.startswith(name_prefix)]
        return queued + [job for job in _newest(matching) if (job.job_id, job.submit_time) not in known]

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        if not ids:
            return {}
        wanted = set(ids)
        found = {job.job_id: job for job in self._queue() if job.job_id in wanted}
        missing = sorted(wanted - set(found))
        if missing:
            recorded = self._accounting(["-j", ",".join(missing)])
            found.update({job.job_id: job for job in _newest(recorded or []) if job.job_id in wanted})
        return self._with_down_nodes(found)

    def release(self, job_id: str, submission: Path) -> None:
        payload.adopt_payload(submission, job_id)
        self._change(["scontrol", "release", job_id], job_id, lambda job: not job.held)

    def cancel(self, job_id: str) -> None:
        self._change(["scancel", job_id], job_id, lambda job: job.state in _OVER)

    def _queue(self) -> list[JobStatus]:
        """This user's jobs, those that ended within MinJobAge included."""
        done = ask(["squeue", "-h", "-a", "--me", "-t", "all", "-O", SQUEUE_FORMAT], self._timeout)
        if done.returncode != 0:
            raise unreachable("squeue", done.stderr)
        try:
            return read_queue(done.stdout)
        except Garbage as error:
            raise unreachable("squeue", str(error)) from error

    def _with_down_nodes(self, jobs: dict[str, JobStatus]) -> dict[str, JobStatus]:
        """Tell of jobs that are over which of their nodes are down: a job may end before Slurm misses its node."""
        suspects = {node for job in jobs.values() if job.state in _OVER for node in job.nodes}
        if not suspects:
            return jobs
        done = ask(["sinfo", "-h", "-N", "-n", fold_nodes(tuple(sorted(suspects))), "-o", "%N %T"], self._timeout)
        if done.returncode != 0:
            raise unreachable("sinfo", done.stderr)
        try:
            down = read_down_nodes(done.stdout)
        except Garbage as error:
            raise unreachable("sinfo", str(error)) from error
        return {
            job_id: replace(job, nodes_down=tuple(node for node in job.nodes if node in down))
            for job_id, job in jobs.items()
        }

    def _accounting(self, which: list[str]) -> list[JobStatus] | None:
        """Rows of accounting; None where the site keeps none. Raises SlurmUnreachable when it cannot be read."""
        shape = ["-X", "-D", "-n", "-p", "--delimiter", SEPARATOR, "-o", SACCT_FORMAT, "-u", str(os.getuid())]
        done = ask(["sacct", *shape, *which], self._timeout)
        if _NO_ACCOUNTING in done.stderr.lower():
            return None
        # WARNING: sacct may exit 0 with an empty answer when slurmdbd is away, and say so on stderr only
        if done.returncode != 0 or "error:" in done.stderr:
            raise unreachable("sacct", done.stderr)
        try:
            return join_resized(read_accounting(done.stdout))
        except Garbage as error:
            raise unreachable("sacct", str(error)) from error

    def _change(self, command: list[str], job_id: str, done: Callable[[JobStatus], bool]) -> None:
        """Change one job; when Slurm objects, the job's state tells whether anything is left to do.

        `scontrol release` fails on a released job whose nodes are not there now, and `scancel` on one that has ended.
        """
        said = ask(command, self._timeout)
        if said.returncode == 0:
            return
        job = self.poll([job_id]).get(job_id)
        if job is not None and not done(job):
            raise unreachable(" ".join(command), said.stderr)


def _newest(jobs: list[JobStatus]) -> list[JobStatus]:
    """One row for each job id and submission: -D lists a requeued job again, and ids are given out again."""
    rows: dict[tuple[str, str], JobStatus] = {}
    for job in sorted(jobs, key=lambda job: job.submit_time):
        rows[job.job_id, job.submit_time] = job
    return list(rows.values())


def render(spec: JobSpec) -> str:
    """The text of the sbatch script, for `--print-sbatch`; raises ConfigError."""
    from orchestrator.scheduler import sbatch  # submitit: only where a script is made

    return sbatch.text(spec)
