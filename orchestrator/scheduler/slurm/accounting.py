"""Slurm's accounting (sacct), queried in the background, because slurmdbd may take minutes to answer."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import UNRECORDED, Backoff, JobStatus
from orchestrator.scheduler.slurm.command_output import (
    SEPARATOR,
    TIMEOUT_S,
    UnreadableField,
    Version,
    accounting_fields,
    ended_incarnations,
    ended_jobs,
    join_resized,
    no_contact,
    read_accounting,
    run_command,
    unreachable,
)
from orchestrator.scheduler.slurm.site_features import SiteFeatures

ASK_AGAIN, ASK_AGAIN_AT_MOST = 30.0, 600.0
"""First and longest pause, in seconds, after a query without an answer. Pauses double each time."""
SLOW, REST = 2.0, 2.0
"""Seconds after which an answer was slow, and the pause after a slow answer as a multiple of the time that it took."""
_NO_ACCOUNTING = "accounting storage is disabled"
log = logging.getLogger("orch.controller")


class Accounting:
    """Accounting's records of ended jobs. One query runs at a time, in a thread.

    `timeout`: seconds that a query may take. `patience`: seconds that a caller waits for a query that it starts.
    """

    def __init__(
        self, *, timeout: float = TIMEOUT_S, patience: float = TIMEOUT_S, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout, self._patience, self._mono = timeout, patience, mono
        self._failures = Backoff(mono, first=ASK_AGAIN, longest=ASK_AGAIN_AT_MOST)
        self._query: _Query | None = None
        self.site = SiteFeatures()
        self._rests_until = mono()
        self._silence = ""  # why the last query failed

    def find_ended(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return the ended jobs among these ids; ids that accounting has not answered for are UNRECORDED.

        An id without a record is missing. An answer that arrives after this call is returned by the next one.
        """
        answer = self._ask(ids)
        if answer is None:
            return {job_id: _make_unrecorded(job_id, self._reason()) for job_id in ids}
        recorded = {job.job_id: job for job in ended_jobs(answer.rows)}
        found = {job_id: job for job_id, job in recorded.items() if job_id in ids}
        return found | {job_id: _make_unrecorded(job_id, "sacct is queried next") for job_id in set(ids) - answer.ids}

    def find_earlier(self, ids: Collection[str]) -> dict[str, tuple[JobStatus, ...]]:
        """Return the ended runs of these requeued jobs, by id; ids that accounting has not answered for are missing."""
        answer = self._ask(ids)
        if answer is None:
            return {}
        rows = join_resized(answer.rows)
        return {
            job_id: ended_incarnations(row for row in rows if row.job_id == job_id) for job_id in set(ids) & answer.ids
        }

    def _ask(self, ids: Collection[str]) -> "_Query | None":
        """Return an answered query, perhaps of other ids; None if there is none yet."""
        answer = self._collect()
        if answer is None and self._query is None and self._is_due():
            self._query = _Query(frozenset(ids), self._timeout, self._mono, self.site.version())
            self._query.start()
            self._query.join(self._patience)
            answer = self._collect()
        return answer

    def _is_due(self) -> bool:
        return self._failures.is_due("sacct") and self._mono() >= self._rests_until

    def _reason(self) -> str:
        if self._query is not None:
            return "sacct has not answered yet"
        return self._silence if not self._failures.is_due("sacct") else "sacct was slow and will be queried again later"

    def _collect(self) -> "_Query | None":
        """Return the query that has just been answered, or None. A failure starts a pause."""
        query = self._query
        if query is None or query.is_alive():
            return None
        self._query = None
        if query.error is not None:
            self._failures.start("sacct")
            self._silence = query.error.what
            log.warning("%s", self._silence)
            return None
        self._failures.forget("sacct")
        self._rests_until = self._mono() + (REST * query.took if query.took > SLOW else 0.0)
        return query


class _Query(threading.Thread):
    """One call of sacct for some ids. Unless it has an `error`, `rows` are accounting's records."""

    def __init__(self, ids: frozenset[str], timeout: float, mono: Callable[[], float], version: Version) -> None:
        super().__init__(name="sacct", daemon=True)  # the process may exit while sacct runs
        self.ids, self.rows, self.took = ids, list[JobStatus](), 0.0
        self.error: SlurmUnreachable | None = SlurmUnreachable("the query of sacct ended without a result")
        self._timeout, self._mono, self._version = timeout, mono, version

    def run(self) -> None:
        began = self._mono()
        try:
            self.rows, self.error = query_accounting(self.ids, self._timeout, self._version), None
        except SlurmUnreachable as error:
            self.error = error
        self.took = self._mono() - began


def query_accounting(ids: Collection[str], timeout: float = TIMEOUT_S, version: Version = ()) -> list[JobStatus]:
    """Return accounting's rows of these jobs; none if Slurm has no accounting. Raises SlurmUnreachable."""
    shape = [
        "-X",
        "-D",
        "-n",
        "-p",
        "--delimiter",
        SEPARATOR,
        "-o",
        ",".join(accounting_fields(version)),
        "-u",
        str(os.getuid()),
    ]
    done = run_command(["sacct", *shape, "-j", ",".join(sorted(ids))], timeout)
    if _NO_ACCOUNTING in done.stderr.lower():
        return []
    # WARNING: sacct may exit 0 with empty output if slurmdbd is unreachable, and report this only on stderr
    said_nothing = "error:" in done.stderr and not done.stdout.strip()
    if done.returncode != 0 or said_nothing or no_contact(done.stderr):
        raise unreachable("sacct", done.stderr)
    try:
        recorded, whole = read_accounting(done.stdout, lambda job: job.job_id in ids, version)
    except UnreadableField as error:
        raise unreachable("sacct", str(error)) from error
    if not whole:
        raise unreachable("sacct", "its output was truncated")
    return recorded


def _make_unrecorded(job_id: str, reason: str) -> JobStatus:
    return JobStatus(job_id=job_id, name="", state=UNRECORDED, reason=reason)
