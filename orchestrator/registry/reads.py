"""Reads of the registry."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.errors import NotFound, RegistryError, RunExpected
from orchestrator.registry.database import StoreOperations, reads
from orchestrator.registry.fast_queries import covering_lease
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    Generation,
    Lease,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    Transition,
    UserRequest,
)
from orchestrator.states import RunState
from trainer.protocol.config_sections.moved_keys import in_present_keys

_DOMAIN_RUNS = "(SELECT name FROM runs WHERE scheduler = ? OR (scheduler = '' AND cluster = ?))"
"""Names of one scheduler's runs; runs without a known scheduler match by kind."""
_NO_TEST = "NOT EXISTS (SELECT 1 FROM restore_tests WHERE restore_tests.test = runs.name)"


class Reads(StoreOperations):
    """All reads of the registry."""

    @reads
    def run(self, name: str) -> Run:
        """Return the run with this name or unique prefix, or the newest one (`@last`). Raises NotFound.

        A restore test is found by its whole name, or by a prefix that matches only restore tests.
        """
        found = self.database.first(Run, "WHERE name = ?", name)
        return self.named_run(self._resolve_name(name)) if found is None else found

    @reads
    def named_run(self, name: str) -> Run:
        """Return the run with exactly this name. Raises NotFound."""
        found = self.database.first(Run, "WHERE name = ?", name)
        if found is None:
            raise NotFound(f"no run {name}", hint="`orch status` lists the runs")
        return found

    @reads
    def runs(self, states: Iterable[RunState] | None = None, limit: int | None = None) -> list[Run]:
        """Return the runs, newest first."""
        wanted = [] if states is None else sorted(states)
        where = "" if states is None else f"WHERE state IN ({_marks(wanted)})"
        return self.database.find(Run, f"{where} ORDER BY id DESC LIMIT ?", *wanted, -1 if limit is None else limit)

    @reads
    def attempts(self, run: str) -> list[Attempt]:
        """Return the attempts of a run, oldest first."""
        return self.database.find(Attempt, "WHERE run = ? ORDER BY number", run)

    @reads
    def attempt(self, run: str, number: int) -> Attempt:
        """Return an attempt of a run. Raises NotFound."""
        found = self.database.first(Attempt, "WHERE run = ? AND number = ?", run, number)
        if found is None:
            raise NotFound(f"run {run} has no attempt {number}", hint=f"`orch show {run}` lists its attempts")
        return found

    @reads
    def submissions(self, run: str | None = None, *, since: float = 0.0) -> list[Submission]:
        """Return the submissions of one run, or of all, since a time; oldest first."""
        tail = "WHERE submitted_at >= ? AND run = coalesce(?, run) ORDER BY submitted_at, run, attempt, number"
        return self.database.find(Submission, tail, since, run)

    @reads
    def generations(self, run: str, attempt: int | None = None) -> list[Generation]:
        """Return the generations of a run or of one attempt, oldest first."""
        tail = "WHERE run = ? AND attempt = coalesce(?, attempt) ORDER BY attempt, number"
        return self.database.find(Generation, tail, run, attempt)

    @reads
    def checkpoint(self, run: str, name: str) -> Checkpoint:
        """Return a checkpoint. Raises NotFound."""
        found = self.database.first(Checkpoint, "WHERE run = ? AND name = ?", run, name)
        if found is None:
            raise NotFound(f"run {run} has no checkpoint {name}", hint=f"`orch ckpt ls {run}` lists them")
        return found

    @reads
    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, newest first, deleted ones included."""
        return self.database.find(Checkpoint, "WHERE run = ? ORDER BY step DESC, committed_at DESC, name DESC", run)

    @reads
    def copies(self, run: str) -> list[CheckpointCopy]:
        """Return the copies of a run's checkpoints in further tiers, by checkpoint and tier."""
        return self.database.find(CheckpointCopy, "WHERE run = ? ORDER BY name, tier", run)

    @reads
    def restore_test(self, test: str) -> RestoreTest | None:
        """Return the restore test executed by the run `test`; None for any other run."""
        return self.database.first(RestoreTest, "WHERE test = ?", test)

    @reads
    def restore_tests(
        self, run: str | None = None, *, going_on: bool = False, since: float = 0.0
    ) -> list[RestoreTest]:  # fmt: skip
        """Return the restore tests of one run or of all, oldest first; `going_on`: only without a verdict."""
        unfinished = "AND ended_at IS NULL" if going_on else ""
        tail = f"WHERE begun_at >= ? AND run = coalesce(?, run) {unfinished} ORDER BY begun_at, test"
        return self.database.find(RestoreTest, tail, since, run)

    @reads
    def history(self, cluster: str, since: float) -> tuple[list[Attempt], list[Generation]]:
        """Return the attempts on a cluster (`Run.domain`) that ran since a time, and failed generations of its runs."""
        lived = "started_at IS NOT NULL AND (ended_at IS NULL OR ended_at >= ?)"
        failed = "failure IS NOT NULL AND started_at >= ?"
        values = (cluster, cluster, since)
        return (
            self.database.find(Attempt, f"WHERE run IN {_DOMAIN_RUNS} AND {lived}", *values),
            self.database.find(Generation, f"WHERE run IN {_DOMAIN_RUNS} AND {failed}", *values),
        )

    @reads
    def transitions(self, run: str) -> list[Transition]:
        """Return all state changes of a run, its attempts and its checkpoints, in the order of recording."""
        return self.database.find(Transition, "WHERE run = ? ORDER BY id", run)

    @reads
    def changes_after(self, number: int, since: float) -> list[tuple[int, str]]:
        """Return numbers and run names of run state changes after `number`, since a time."""
        query = "SELECT id, run FROM transitions WHERE id > ? AND kind = 'run' AND time >= ? ORDER BY id"
        return self.database.execute(query, (number, since)).fetchall()

    @reads
    def notices(self, run: str) -> list[Notice]:
        """Return the notices of a run's attempts, oldest first."""
        return self.database.find(Notice, "WHERE run = ? ORDER BY time, attempt, source, seq", run)

    @reads
    def cluster_notices(self, cluster: str, kinds: Iterable[str], since: float) -> list[Notice]:
        """Return the notices of these kinds in all runs of a cluster since a time, oldest first."""
        wanted = sorted(kinds)
        where = f"WHERE kind IN ({_marks(wanted)}) AND time >= ? AND run IN {_DOMAIN_RUNS}"
        order = "ORDER BY time, run, attempt, source, seq"
        return self.database.find(Notice, f"{where} {order}", *wanted, since, cluster, cluster)

    @reads
    def nodes(self) -> list[Node]:
        """Return every node seen, by cluster and name."""
        return self.database.find(Node, "ORDER BY cluster, name")

    @reads
    def config(self, digest: str) -> dict[str, Any]:
        """Return the resolved config with this digest, converted to the keys of this version.

        Raises NotFound, or RegistryError if its bytes are damaged.
        """
        row = self.database.execute("SELECT data FROM configs WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise NotFound(f"no config {digest}", hint="`orch show RUN` tells a run's digest")
        if hashlib.sha256(row[0].encode()).hexdigest() != digest:
            raise RegistryError(f"config {digest} is damaged: its bytes do not match", where=str(self.database.path))
        return in_present_keys(json.loads(row[0]))

    @reads
    def config_digests(self) -> set[str]:
        """Return the digests of all configs."""
        return {row[0] for row in self.database.execute("SELECT digest FROM configs")}

    @reads
    def leases(self) -> list[Lease]:
        """Return each scheduler instance's lease, newest first, including expired and dropped (no holder) ones."""
        return self.database.find(Lease, "ORDER BY holder = '', renewed_at DESC, epoch DESC")

    def lease(self, scheduler: str | None = None) -> Lease | None:
        """Return the lease for a scheduler instance's runs, or of the last controller alive; None before the first."""
        found = self.leases()
        return next(iter(found), None) if scheduler is None else covering_lease(found, scheduler)

    @reads
    def user_requests(self, pending: bool = True) -> list[UserRequest]:
        """Return the requests of people, oldest first; with `pending` only unanswered ones."""
        return self.database.find(UserRequest, f"{'WHERE answered_at IS NULL' if pending else ''} ORDER BY id")

    def cursor(self, run: str, file: str) -> int:
        """Return the offset from which an event file of the run is unread."""
        return self.cursors(run).get(file, 0)

    @reads
    def cursors(self, run: str) -> dict[str, int]:
        """Return the read offset of every event file of a run."""
        return dict(self.database.execute('SELECT file, "offset" FROM cursors WHERE run = ?', (run,)).fetchall())

    def _resolve_name(self, name: str) -> str:
        """Return the whole name; a prefix matches restore tests only if it matches no other run."""
        if self._names("name = ?", name):
            return name
        if name == "@last":
            newest = self._names(_NO_TEST, limit=1)
            if not newest:
                raise NotFound("there is no run yet", hint="`orch submit tiny-gpt` starts one")
            return newest[0]
        begins = "?1 <> '' AND substr(name, 1, length(?1)) = ?1"
        matches = self._names(f"{begins} AND {_NO_TEST}", name, limit=6) or self._names(begins, name, limit=6)
        if len(matches) == 1:
            return matches[0]
        if matches:
            shown = ", ".join(matches[:5]) + (", ..." if len(matches) > 5 else "")
            raise NotFound(f"several runs begin with {name}: {shown}", hint="type more of the name")
        run, mark, _ = name.rpartition("@")
        if run and mark:
            raise RunExpected(name, self._resolve_name(run))
        if "/" in name:  # its folder, or a path inside it
            parts = list(reversed(Path(os.path.abspath(os.path.expanduser(name))).parts))
            known = self._names(f"name IN ({_marks(parts)})", *parts)
            if meant := next((part for part in parts if part in known), None):
                raise NotFound(f"{name} is a path, and the name of a run is needed", hint=f"did you mean {meant}?")
            name = parts[0]
        near = difflib.get_close_matches(name, self._names("true", limit=1000), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`orch status -n 50` lists the newest runs"
        raise NotFound(f"no run {' '.join(name.split())}", hint=hint)

    def _names(self, condition: str, *values: str, limit: int = -1) -> list[str]:
        """Return the names of the runs that meet a condition, newest first."""
        query = f"SELECT name FROM runs WHERE {condition} ORDER BY id DESC LIMIT {limit}"
        return [row[0] for row in self.database.execute(query, values)]


def _marks(values: list[Any]) -> str:
    return ", ".join("?" * len(values))
