"""The Slurm scheduler: jobs are submitted held through submitit, and looked up through squeue and sacct."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import SlurmUnreachable, SubmitRejected
from orchestrator.scheduler.interface import (
    ENDED_STATES,
    LEAVING_STATES,
    UNREADABLE,
    JobSpec,
    JobStatus,
    find_script_tag,
    is_marked,
    tags,
)
from orchestrator.scheduler.script import AGENT, adopt_payload
from orchestrator.scheduler.slurm.accounting import Accounting
from orchestrator.scheduler.slurm.command_output import (
    DOWN,
    OUT_OF_SERVICE,
    OUTPUT_FORMAT,
    SEARCH_FORMAT,
    TIMEOUT_S,
    Listing,
    Mine,
    UnreadableField,
    fold_nodes,
    queue_format,
    read_node_states,
    read_outputs,
    read_queue,
    read_search,
    run_command,
    unreachable,
)
from orchestrator.scheduler.slurm.sbatch_values import check_nodes
from orchestrator.scheduler.slurm.site_features import SiteFeatures
from trainer.protocol.cut_text import cut

MOST_IDS = 5000  # maximum number of ids in one command; Linux limits an argument to 128 KiB
SLOW_ACCOUNTING, SHORT_WAIT = 180.0, 2.0
"""Seconds that sacct may take in the background, and that a pass of a daemon waits for it."""
_NO_SUCH_JOB = "invalid job id"
log = logging.getLogger("orch.controller")
_OVER = ENDED_STATES | LEAVING_STATES


class SlurmScheduler:
    """Scheduler on Slurm (see `interface.Scheduler`); stores query settings, script tags and queries of accounting."""

    kind = "slurm"

    def __init__(self, *, entry: str = AGENT, timeout: float = TIMEOUT_S, accounting: Accounting | None = None) -> None:
        self._entry, self._timeout = entry, timeout
        self._script_tags: dict[tuple[str, str], str] = {}
        self._accounting = accounting or Accounting(timeout=timeout)
        self._site = self._accounting.site
        self._earlier: dict[tuple[str, str], tuple[JobStatus, ...]] = {}

    @classmethod
    def for_daemon(cls) -> "SlurmScheduler":
        """Return a scheduler for a process that stays: it does not wait for slow accounting, but asks again later."""
        return cls(accounting=Accounting(timeout=SLOW_ACCOUNTING, patience=SHORT_WAIT))

    def submit(self, spec: JobSpec) -> str:
        from orchestrator.scheduler.slurm import sbatch  # submitit: only needed for submission

        return sbatch.submit(spec, self._entry, expedite=spec.expedite and self._site.expedites())

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        def mine(job: JobStatus) -> bool:
            return is_marked(job, name_prefix, known)

        listed = self._search()
        damaged = [job for job in listed if job.state == UNREADABLE and mine(job)]
        marked = {job.job_id for job in listed if mine(job)} - {""}
        # A site may have changed all marks but the output path, which has no short format.
        if others := {job.job_id for job in listed} - marked - {""}:
            marked |= {job.job_id for job in self._find_by_output(mine, others)}
        found = _require_whole(self._queue(mine, marked)) if marked else []
        readable = {job.job_id for job in found}
        return [*found, *(job for job in damaged if job.job_id not in readable)]

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        if not ids:
            return {}
        found = self._with_earlier(self._in_queue(ids))
        if missing := set(ids) - set(found):
            found |= self._accounting.find_ended(missing)
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
        """Return those of these jobs that are in the queue."""
        jobs, whole = self._queue(lambda job: job.job_id in ids, ids)
        found = {job.job_id: job for job in jobs}
        lost = () if whole else set(ids) - set(found)
        return found | {job_id: _status(job_id, UNREADABLE, "squeue's answer was cut short") for job_id in lost}

    def _search(self) -> list[JobStatus]:
        """Return all jobs of this user but array tasks, from short rows."""
        return _require_whole(self._read_queue(read_search, ["-o", SEARCH_FORMAT]))

    def _find_by_output(self, mine: Mine, ids: Collection[str]) -> list[JobStatus]:
        """Return those of these jobs whose output path satisfies `mine`."""
        return _require_whole(
            self._read_queue(lambda text: read_outputs(text, mine), [*_only(ids), "-O", OUTPUT_FORMAT])
        )

    def _queue(self, mine: Mine, ids: Collection[str]) -> Listing:
        """Return those of these jobs that satisfy `mine`, including jobs that ended within MinJobAge."""

        def is_wanted(job: JobStatus) -> bool:
            return (job.job_id in ids or not job.job_id) and mine(job)

        version = self._site.version()
        options = [*_only(ids), "-O", queue_format(version)]
        jobs, whole = self._read_queue(lambda text: read_queue(text, is_wanted, version), options)
        return Listing([self._with_script_tag(job) for job in jobs], whole)

    def _read_queue(self, read: Callable[[str], Listing], options: Sequence[str]) -> Listing:
        try:
            return read(self._squeue(options))
        except UnreadableField as error:
            raise unreachable("squeue", str(error)) from error

    def _squeue(self, options: Sequence[str]) -> str:
        """Return squeue's rows of this user's jobs; empty if it knows none of the ids in `options`."""
        done = run_command(["squeue", "-h", "-a", "--me", "-t", "all", *options], self._timeout)
        # squeue fails for a single unknown id, which is a definite answer.
        if done.returncode != 0 and not ("-j" in options and _NO_SUCH_JOB in done.stderr.lower()):
            raise unreachable("squeue", done.stderr)
        return done.stdout

    def _with_earlier(self, jobs: dict[str, JobStatus]) -> dict[str, JobStatus]:
        """Add the ended runs of requeued jobs, which only accounting has. It is asked until it has them all."""
        requeued = {job_id: job for job_id, job in jobs.items() if job.sluid and job.restarts}
        known = {job_id: self._earlier.get((job_id, job.sluid), ()) for job_id, job in requeued.items()}
        if unknown := {job_id for job_id, job in requeued.items() if len(known[job_id]) < job.restarts}:
            known |= self._accounting.find_earlier(unknown)
        self._earlier = {(job_id, requeued[job_id].sluid): rows for job_id, rows in known.items()}
        return jobs | {job_id: replace(job, earlier=known[job_id]) for job_id, job in requeued.items()}

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
        recorded = self._accounting.find_ended(unclear) if unclear else {}
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


def _require_whole(listing: Listing) -> list[JobStatus]:
    """Return the jobs of an answer. Raises SlurmUnreachable if it was truncated, because any job may be missing."""
    if not listing.whole:
        raise unreachable("squeue", "its output was truncated")
    return listing.jobs


def _only(ids: Collection[str]) -> list[str]:
    """Return squeue's option for these jobs; none for more ids than a command line holds."""
    return ["-j", ",".join(sorted(ids))] if len(ids) <= MOST_IDS else []


def _status(job_id: str, state: str, reason: str) -> JobStatus:
    return JobStatus(job_id=job_id, name="", state=state, reason=reason)


# -- the login node's operations; sbatch imports submitit, which only a job's script and submission need


def render(spec: JobSpec) -> str:
    """Return the text of the sbatch script, for `--print-sbatch`. Raises ConfigError."""
    from orchestrator.scheduler.slurm import sbatch

    return sbatch.text(spec, expedite=spec.expedite and SiteFeatures(sbatch.TEST_TIMEOUT_S).expedites())


def refusal(spec: JobSpec) -> SubmitRejected | None:
    """Return Slurm's refusal of the job, or None."""
    from orchestrator.scheduler.slurm import sbatch

    return sbatch.refusal(spec)


def has_node(name: str) -> bool:
    """Return whether Slurm reports a node with this name."""
    done = run_command(["sinfo", "-h", "-a", "-N", "-n", name, "-o", "%N"])
    return done.returncode == 0 and name in done.stdout.split()
