"""The Slurm scheduler: jobs are submitted held through submitit, and looked up through squeue and sacct."""

import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import SlurmUnreachable, SubmitRejected
from orchestrator.scheduler.interface import (
    ENDED_STATES,
    LEAVING_STATES,
    UNREADABLE,
    UNRECORDED,
    Backoff,
    JobSpec,
    JobStatus,
    find_script_tag,
    is_marked,
    tags,
)
from orchestrator.scheduler.script import AGENT, adopt_payload
from orchestrator.scheduler.slurm.command_output import (
    DOWN,
    OUT_OF_SERVICE,
    SACCT_FORMAT,
    SEPARATOR,
    SQUEUE_FORMAT,
    TIMEOUT_S,
    Listing,
    Mine,
    UnreadableField,
    ended_jobs,
    fold_nodes,
    no_contact,
    read_accounting,
    read_node_states,
    read_queue,
    run_command,
    unreachable,
)
from orchestrator.scheduler.slurm.sbatch_values import check_nodes
from trainer.protocol.cut_text import cut

ASK_AGAIN, ASK_AGAIN_AT_MOST = 30.0, 600.0
"""First and longest pause, in seconds, between queries to unresponsive accounting. Pauses double each time."""

_NO_ACCOUNTING = "accounting storage is disabled"
_NO_SUCH_JOB = "invalid job id"
log = logging.getLogger("orch.controller")
_OVER = ENDED_STATES | LEAVING_STATES


class SlurmScheduler:
    """Scheduler on Slurm (see `interface.Scheduler`); stores query settings, script tags and retry pauses."""

    kind = "slurm"

    def __init__(self, *, entry: str = AGENT, timeout: float = TIMEOUT_S) -> None:
        self._entry, self._timeout = entry, timeout
        self._script_tags: dict[tuple[str, str], str] = {}
        self._pauses = Backoff(time.monotonic, first=ASK_AGAIN, longest=ASK_AGAIN_AT_MOST)

    def submit(self, spec: JobSpec) -> str:
        from orchestrator.scheduler.slurm import sbatch  # submitit: only needed for submission

        return sbatch.submit(spec, self._entry)

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        queued, whole = self._queue(lambda job: is_marked(job, name_prefix, known))
        if not whole:
            raise unreachable("squeue", "its output was truncated")
        return queued

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        if not ids:
            return {}
        found = self._in_queue(ids)
        if missing := set(ids) - set(found):
            found |= self._query_accounting(missing)
        return self._with_down_nodes(self._with_cancellers(found))

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        adopt_payload(submission, job_id)
        if exclude is not None:
            nodes = check_nodes("cluster.exclude", exclude)
            done = run_command(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"], self._timeout)
            if done.returncode != 0:
                words = cut(" ".join(done.stderr.split()), 300)
                raise SubmitRejected(f"Slurm refuses to change the nodes that job {job_id} avoids: {words}")
        done = run_command(["scontrol", "release", job_id], self._timeout)
        if done.returncode == 0:
            return
        # Without slurmctld, scontrol only prints "Unexpected message received" (22.05), so the queue distinguishes
        # silence from a refusal. Slurm refuses to release a job that it holds itself, or whose nodes are missing.
        job = self._in_queue([job_id]).get(job_id)
        if job is not None and job.held:
            log.info("Slurm refuses to release job %s (%s): %s", job_id, job.reason, " ".join(done.stderr.split()))

    def cancel(self, job_id: str) -> None:
        done = run_command(["scancel", job_id], self._timeout)
        if done.returncode == 0:
            return
        job = self._in_queue([job_id]).get(job_id)
        if job is not None and job.state not in _OVER:
            raise unreachable(f"scancel {job_id}", done.stderr)

    def _in_queue(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Find these ids in the queue. An id missing from this user's jobs is queried separately."""
        jobs, _ = self._queue(lambda job: job.job_id in ids)  # ids missing from a truncated answer are queried by id
        found = {job.job_id: job for job in jobs}
        missing = set(ids) - set(found)
        if not missing:
            return found
        try:
            jobs, whole = self._queue(lambda job: job.job_id in missing, ["-j", ",".join(sorted(missing))])
        except SlurmUnreachable as error:
            if not found:
                raise
            return found | {job_id: _status(job_id, UNREADABLE, error.what) for job_id in missing}
        found |= {job.job_id: job for job in jobs}
        lost = () if whole else missing - set(found)
        return found | {job_id: _status(job_id, UNREADABLE, "squeue's answer was cut short") for job_id in lost}

    def _query_accounting(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return accounting's record of jobs that have left the queue; UNRECORDED while it does not answer."""
        if not self._pauses.is_due("sacct"):
            why = "sacct has not answered and will be queried again later"
            return {job_id: _status(job_id, UNRECORDED, why) for job_id in ids}
        try:
            recorded = self._accounting(["-j", ",".join(sorted(ids))], lambda job: job.job_id in ids)
        except SlurmUnreachable as error:
            self._pauses.start("sacct")
            log.warning("%s", error.what)
            return {job_id: _status(job_id, UNRECORDED, error.what) for job_id in ids}
        self._pauses.forget("sacct")
        return {job.job_id: job for job in ended_jobs(recorded or [])}

    def _queue(self, mine: Mine, which: Sequence[str] = ()) -> Listing:
        """Return this user's jobs that satisfy `mine`, including jobs that ended within MinJobAge."""
        done = run_command(["squeue", "-h", "-a", "--me", "-t", "all", *which, "-O", SQUEUE_FORMAT], self._timeout)
        if done.returncode != 0:
            # squeue fails for a single unknown id, which is a definite answer.
            if which and _NO_SUCH_JOB in done.stderr.lower():
                return Listing([], True)
            raise unreachable("squeue", done.stderr)
        try:
            jobs, whole = read_queue(done.stdout, mine)
        except UnreadableField as error:
            raise unreachable("squeue", str(error)) from error
        return Listing([self._with_script_tag(job) for job in jobs], whole)

    def _with_script_tag(self, job: JobStatus) -> JobStatus:
        """Read the job's tag from its script if it has no other tag, because ids are reused after a crash."""
        if job.state in _OVER or job.state == UNREADABLE or tags(job):
            return job
        key = job.job_id, job.submit_time
        if key not in self._script_tags:
            try:
                done = run_command(["scontrol", "write", "batch_script", job.job_id, "-"], self._timeout)
            except SlurmUnreachable:
                return job
            # scontrol succeeds without a script for a job that Slurm no longer has.
            if done.returncode != 0 or not done.stdout:
                return job
            self._script_tags[key] = find_script_tag(done.stdout)
        return replace(job, script_tag=self._script_tags[key])

    def _with_cancellers(self, jobs: dict[str, JobStatus]) -> dict[str, JobStatus]:
        """Record who cancelled the jobs whose script never ran: only accounting has the user id."""
        unclear = {job_id for job_id, job in jobs.items() if job.source == "queue" and job.unlaunched}
        recorded = self._query_accounting(unclear) if unclear else {}
        return jobs | {
            job_id: replace(jobs[job_id], cancelled_by=row.cancelled_by)
            for job_id, row in recorded.items()
            if row.submit_time == jobs[job_id].submit_time
        }

    def _with_down_nodes(self, jobs: dict[str, JobStatus]) -> dict[str, JobStatus]:
        """Record the down nodes of jobs that are over: a job may end before Slurm notices its missing node."""
        over = {job_id: job for job_id, job in jobs.items() if job.state in _OVER and job.nodes}
        if not over:
            return jobs
        try:
            down = self._query_nodes_by_state(DOWN, frozenset(node for job in over.values() for node in job.nodes))
        except SlurmUnreachable as error:
            if len(over) == len(jobs):
                raise
            return jobs | {job_id: _status(job_id, UNREADABLE, error.what) for job_id in over}
        return jobs | {
            job_id: replace(job, nodes_down=tuple(node for node in job.nodes if node in down))
            for job_id, job in over.items()
        }

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        return self._query_nodes_by_state(OUT_OF_SERVICE, nodes)

    def _query_nodes_by_state(self, states: frozenset[str], nodes: frozenset[str]) -> frozenset[str]:
        which = fold_nodes(tuple(sorted(nodes)))
        done = run_command(["sinfo", "-h", "-a", "-N", "-n", which, "-o", "%N %T"], self._timeout)
        if done.returncode != 0:
            raise unreachable("sinfo", done.stderr)
        try:
            return read_node_states(done.stdout, nodes, states)
        except UnreadableField as error:
            raise unreachable("sinfo", str(error)) from error

    def _accounting(self, which: list[str], mine: Mine = lambda job: True) -> list[JobStatus] | None:
        """Return accounting rows that satisfy `mine`, or None if there is no accounting. Raises SlurmUnreachable."""
        shape = ["-X", "-D", "-n", "-p", "--delimiter", SEPARATOR, "-o", SACCT_FORMAT, "-u", str(os.getuid())]
        done = run_command(["sacct", *shape, *which], self._timeout)
        if _NO_ACCOUNTING in done.stderr.lower():
            return None
        # WARNING: sacct may exit 0 with empty output if slurmdbd is unreachable, and report this only on stderr
        said_nothing = "error:" in done.stderr and not done.stdout.strip()
        if done.returncode != 0 or said_nothing or no_contact(done.stderr):
            raise unreachable("sacct", done.stderr)
        try:
            recorded, whole = read_accounting(done.stdout, mine)
        except UnreadableField as error:
            raise unreachable("sacct", str(error)) from error
        if not whole:
            raise unreachable("sacct", "its output was truncated")
        return recorded


def _status(job_id: str, state: str, reason: str) -> JobStatus:
    return JobStatus(job_id=job_id, name="", state=state, reason=reason)


# -- the login node's operations; sbatch imports submitit, which only a job's script and submission need


def render(spec: JobSpec) -> str:
    """Return the text of the sbatch script, for `--print-sbatch`. Raises ConfigError."""
    from orchestrator.scheduler.slurm import sbatch

    return sbatch.text(spec)


def refusal(spec: JobSpec) -> SubmitRejected | None:
    """Return Slurm's refusal of the job, or None."""
    from orchestrator.scheduler.slurm import sbatch

    return sbatch.refusal(spec)


def has_node(name: str) -> bool:
    """Return whether Slurm reports a node with this name."""
    done = run_command(["sinfo", "-h", "-a", "-N", "-n", name, "-o", "%N"])
    return done.returncode == 0 and name in done.stdout.split()
