"""Reads of the registry."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, bindparam, exists, false, func, select, true

from orchestrator.errors import NotFound, RegistryError, RunExpected
from orchestrator.registry.database import StoreOperations
from orchestrator.registry.fast_queries import covering_lease
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    ConfigText,
    EventCursor,
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
from orchestrator.registry.tables import TABLES, is_among
from orchestrator.states import RunState

_RUNS, _TESTS = TABLES[Run].c, TABLES[RestoreTest].c
_ATTEMPTS, _GENERATIONS, _NOTICES = TABLES[Attempt].c, TABLES[Generation].c, TABLES[Notice].c
_SINCE: BindParameter[Any] = bindparam("since")
_IN_STATES = is_among(_RUNS.state, "states")
_IN_SWEEP = func.json_extract(_RUNS.sweep, "$.name") == bindparam("sweep")
_LIVED = _ATTEMPTS.started_at.is_not(None) & (_ATTEMPTS.ended_at.is_(None) | (_ATTEMPTS.ended_at >= _SINCE))
_FAILED = _GENERATIONS.failure.is_not(None) & (_GENERATIONS.started_at >= _SINCE)
_NOTED = is_among(_NOTICES.kind, "kinds") & (_NOTICES.time >= _SINCE)
_OF_RUNS = is_among(_ATTEMPTS.run, "runs")
_SUBMITTED = TABLES[Submission].c.submitted_at >= _SINCE
_BEGUN, _GOING_ON = _TESTS.begun_at >= _SINCE, _TESTS.ended_at.is_(None)
_PENDING = TABLES[UserRequest].c.answered_at.is_(None)
_UNASSIGNED = (_RUNS.scheduler == "") & (_RUNS.cluster == bindparam("domain"))
_DOMAIN_RUNS = select(_RUNS.name).where((_RUNS.scheduler == bindparam("domain")) | _UNASSIGNED)
"""Names of one scheduler's runs. Runs without a known scheduler match by kind."""
_IN_DOMAIN = {kind: TABLES[kind].c.run.in_(_DOMAIN_RUNS) for kind in (Attempt, Generation, Notice)}
_NO_TEST = ~exists().where(_TESTS.test == _RUNS.name)


class Reads(StoreOperations):
    """All reads of the registry."""

    def run(self, name: str) -> Run:
        """Return the run with this name or unique prefix, or the newest one (`@last`). Raises NotFound.

        A restore test needs its full name, or a prefix that matches only restore tests.
        """
        found = self.database.first(Run, name=name)
        return self.named_run(self._resolve_name(name)) if found is None else found

    def named_run(self, name: str) -> Run:
        """Return the run with exactly this name. Raises NotFound."""
        found = self.database.first(Run, name=name)
        if found is None:
            raise NotFound(f"no run {name}", hint="`orch status` lists the runs")
        return found

    def predecessor(self, run: Run) -> Run | None:
        """Return the run after which this one starts; None if it has been removed, even if its name is used again."""
        found = self.database.first(Run, name=run.predecessor)
        return found if found is not None and run.predecessor_created_at in (0.0, found.created_at) else None

    def runs(self, states: Iterable[RunState] | None = None, limit: int | None = None) -> list[Run]:
        """Return the runs, newest first."""
        if states is None:
            return self.database.find(Run, limit=limit)
        return self.database.find(Run, _IN_STATES, values={"states": sorted(states)}, limit=limit)

    def sweep_runs(self, name: str) -> list[Run]:
        """Return the runs of a sweep, newest first; no runs for an empty name."""
        return self.database.find(Run, _IN_SWEEP, values={"sweep": name}) if name else []

    def attempts(self, run: str) -> list[Attempt]:
        """Return the attempts of a run, oldest first."""
        return self.database.find(Attempt, run=run)

    def attempts_by_run(self, runs: Iterable[str]) -> dict[str, tuple[Attempt, ...]]:
        """Return the attempts of each of these runs, oldest first."""
        found: dict[str, tuple[Attempt, ...]] = dict.fromkeys(runs, ())
        for attempt in self.database.find(Attempt, _OF_RUNS, values={"runs": list(found)}):
            found[attempt.run] += (attempt,)
        return found

    def attempt(self, run: str, number: int) -> Attempt:
        """Return an attempt of a run. Raises NotFound."""
        found = self.database.first(Attempt, run=run, number=number)
        if found is None:
            raise NotFound(f"run {run} has no attempt {number}", hint=f"`orch show {run}` lists its attempts")
        return found

    def submissions(self, run: str | None = None, *, since: float = 0.0) -> list[Submission]:
        """Return the submissions of one run, or of all, since a given time, oldest first."""
        return self.database.find(Submission, _SUBMITTED, values={"since": since}, **_given(run=run))

    def generations(self, run: str, attempt: int | None = None) -> list[Generation]:
        """Return the generations of a run or of one attempt, oldest first."""
        return self.database.find(Generation, run=run, **_given(attempt=attempt))

    def checkpoint(self, run: str, name: str) -> Checkpoint:
        """Return a checkpoint. Raises NotFound."""
        found = self.database.first(Checkpoint, run=run, name=name)
        if found is None:
            raise NotFound(f"run {run} has no checkpoint {name}", hint=f"`orch ckpt ls {run}` lists them")
        return found

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, newest first, including deleted ones."""
        return self.database.find(Checkpoint, run=run)

    def copies(self, run: str) -> list[CheckpointCopy]:
        """Return the copies of a run's checkpoints in other tiers, ordered by checkpoint and tier."""
        return self.database.find(CheckpointCopy, run=run)

    def restore_test(self, test: str) -> RestoreTest | None:
        """Return the restore test executed by the run `test`; None for any other run."""
        return self.database.first(RestoreTest, test=test)

    def restore_tests(
        self, run: str | None = None, *, going_on: bool = False, since: float = 0.0
    ) -> list[RestoreTest]:  # fmt: skip
        """Return the restore tests of one run or of all, oldest first; `going_on`: only those without a verdict."""
        where = (_BEGUN, _GOING_ON) if going_on else (_BEGUN,)
        return self.database.find(RestoreTest, *where, values={"since": since}, **_given(run=run))

    def history(self, cluster: str, since: float) -> tuple[list[Attempt], list[Generation]]:
        """Return the attempts on a cluster (`Run.domain`) since a given time, and its runs' failed generations."""
        values = {"domain": cluster, "since": since}
        attempts = self.database.find(Attempt, _IN_DOMAIN[Attempt], _LIVED, values=values)
        return attempts, self.database.find(Generation, _IN_DOMAIN[Generation], _FAILED, values=values)

    def transitions(self, run: str) -> list[Transition]:
        """Return all state changes of a run, its attempts and its checkpoints, in the order they were recorded."""
        return self.database.find(Transition, run=run)

    def changes_after(self, number: int, since: float) -> list[tuple[int, str]]:
        """Return the number and run of each change of a run's state after `number` and since a given time."""
        change = TABLES[Transition].c
        wanted = (change.id > number) & (change.kind == "run") & (change.time >= since)
        return self.database.rows(select(change.id, change.run).where(wanted).order_by(change.id))

    def notices(self, run: str) -> list[Notice]:
        """Return the notices of a run's attempts, oldest first."""
        return self.database.find(Notice, run=run)

    def cluster_notices(self, cluster: str, kinds: Iterable[str], since: float) -> list[Notice]:
        """Return the notices of these kinds in all runs of a cluster since a given time, oldest first."""
        values = {"domain": cluster, "kinds": sorted(kinds), "since": since}
        return self.database.find(Notice, _IN_DOMAIN[Notice], _NOTED, values=values)

    def nodes(self) -> list[Node]:
        """Return every node seen, ordered by cluster and name."""
        return self.database.find(Node)

    def config(self, digest: str) -> dict[str, Any]:
        """Return the resolved config with this digest; raises NotFound, or RegistryError if its bytes are damaged."""
        found = self.database.first(ConfigText, digest=digest)
        if found is None:
            raise NotFound(f"no config {digest}", hint="`orch show RUN` prints a run's digest")
        if hashlib.sha256(found.data.encode()).hexdigest() != digest:
            raise RegistryError(f"config {digest} is damaged: its bytes do not match", where=str(self.database.path))
        config: dict[str, Any] = json.loads(found.data)
        return config

    def config_digests(self) -> set[str]:
        """Return the digests of all configs."""
        return {digest for (digest,) in self.database.rows(select(TABLES[ConfigText].c.digest))}

    def leases(self) -> list[Lease]:
        """Return each scheduler instance's lease, newest first, including expired and dropped (no holder) ones."""
        return self.database.find(Lease)

    def lease(self, scheduler: str | None = None) -> Lease | None:
        """Return the lease covering an instance's runs (default: the most recently held lease); None if none does."""
        found = self.leases()
        return next(iter(found), None) if scheduler is None else covering_lease(found, scheduler)

    def user_requests(self, pending: bool = True) -> list[UserRequest]:
        """Return the requests of users, oldest first; with `pending`, only unanswered ones."""
        return self.database.find(UserRequest, *((_PENDING,) if pending else ()))

    def cursors(self, run: str) -> dict[str, int]:
        """Return the read offset of each of a run's event files."""
        return {cursor.file: cursor.offset for cursor in self.database.find(EventCursor, run=run)}

    def _resolve_name(self, name: str) -> str:
        """Return the full name; a prefix matches restore tests only if it matches no other run."""
        if self._names(_RUNS.name == name):
            return name
        if name == "@last":
            newest = self._names(_NO_TEST, limit=1)
            if not newest:
                raise NotFound("there is no run yet", hint="`orch submit tiny-gpt` starts one")
            return newest[0]
        begins = func.substr(_RUNS.name, 1, len(name)) == name if name else false()
        matches = self._names(begins & _NO_TEST, limit=6) or self._names(begins, limit=6)
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
            known = self._names(is_among(_RUNS.name, "parts"), parts=parts)
            if meant := next((part for part in parts if part in known), None):
                raise NotFound(f"{name} is a path, but a run name is needed", hint=f"did you mean {meant}?")
            name = parts[0]
        near = difflib.get_close_matches(name, self._names(true(), limit=1000), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`orch status -n 50` lists the newest runs"
        raise NotFound(f"no run {' '.join(name.split())}", hint=hint)

    def _names(self, condition: ColumnElement[bool], limit: int | None = None, **values: Any) -> list[str]:
        """Return the names of the runs that meet a condition, newest first; `values` are its parameters."""
        query = select(_RUNS.name).where(condition).order_by(_RUNS.id.desc()).limit(limit)
        return [name for (name,) in self.database.rows(query, values)]


def _given(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
