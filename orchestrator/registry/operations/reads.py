"""Reads of the registry."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, exists, false, func, select

from orchestrator.errors import NotFound, RegistryError, RunExpected
from orchestrator.registry.database import StoreOperations, reads
from orchestrator.registry.fast_queries import covering_lease
from orchestrator.registry.models import (
    AttemptRow,
    CheckpointRow,
    ConfigRow,
    CopyRow,
    CursorRow,
    GenerationRow,
    LeaseRow,
    NodeRow,
    NoticeRow,
    RestoreTestRow,
    RunRow,
    SubmissionRow,
    TransitionRow,
    UserRequestRow,
)
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
from orchestrator.registry.rows import find_rows, first_row, generation_rows, record, the_attempt, the_run
from orchestrator.states import RunState
from trainer.protocol.config_sections.moved_keys import in_present_keys


class Reads(StoreOperations):
    """All reads of the registry."""

    @reads
    def run(self, connection: Connection, name: str) -> Run:
        """Return the run with this name or unique prefix, or the newest one (`@last`). Raises NotFound.

        A restore test is found by its whole name, or by a prefix that matches only restore tests.
        """
        found = first_row(connection, RunRow, Run, name=name)
        return the_run(connection, _resolve_name(connection, name)) if found is None else found

    @reads
    def runs(
        self, connection: Connection, states: Iterable[RunState] | None = None, limit: int | None = None
    ) -> list[Run]:
        """Return the runs, newest first."""
        query = select(RunRow.__table__).order_by(RunRow.id.desc())
        if states is not None:
            query = query.where(RunRow.state.in_(sorted(states)))
        rows = connection.execute(query.limit(limit) if limit is not None else query).mappings()
        return [record(Run, row) for row in rows]

    @reads
    def attempts(self, connection: Connection, run: str) -> list[Attempt]:
        """Return the attempts of a run, oldest first."""
        return find_rows(connection, AttemptRow, Attempt, "number", run=run)

    @reads
    def attempt(self, connection: Connection, run: str, number: int) -> Attempt:
        """Return an attempt of a run. Raises NotFound."""
        return the_attempt(connection, run, number)

    @reads
    def submissions(self, connection: Connection, run: str | None = None, *, since: float = 0.0) -> list[Submission]:
        """Return the submissions of one run, or of all, since a time; oldest first."""
        query = select(SubmissionRow.__table__).where(SubmissionRow.submitted_at >= since)
        if run is not None:
            query = query.where(SubmissionRow.run == run)
        order = (SubmissionRow.submitted_at, SubmissionRow.run, SubmissionRow.attempt, SubmissionRow.number)
        return [record(Submission, row) for row in connection.execute(query.order_by(*order)).mappings()]

    @reads
    def generations(self, connection: Connection, run: str, attempt: int | None = None) -> list[Generation]:
        """Return the generations of a run or of one attempt, oldest first."""
        return generation_rows(connection, run, attempt)

    @reads
    def checkpoints(self, connection: Connection, run: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, newest first, deleted ones included."""
        order = "step DESC, committed_at DESC, name DESC"
        return find_rows(connection, CheckpointRow, Checkpoint, order, run=run)

    @reads
    def copies(self, connection: Connection, run: str) -> list[CheckpointCopy]:
        """Return the copies of a run's checkpoints in further tiers, by checkpoint and tier."""
        return find_rows(connection, CopyRow, CheckpointCopy, "name, tier", run=run)

    @reads
    def restore_test(self, connection: Connection, test: str) -> RestoreTest | None:
        """Return the restore test executed by the run `test`; None for any other run."""
        return first_row(connection, RestoreTestRow, RestoreTest, test=test)

    @reads
    def restore_tests(
        self, connection: Connection, run: str | None = None, *, going_on: bool = False, since: float = 0.0
    ) -> list[RestoreTest]:
        """Return the restore tests of one run or of all, oldest first; `going_on`: only without a verdict."""
        query = select(RestoreTestRow.__table__).where(RestoreTestRow.begun_at >= since)
        if run is not None:
            query = query.where(RestoreTestRow.run == run)
        if going_on:
            query = query.where(RestoreTestRow.ended_at.is_(None))
        rows = connection.execute(query.order_by(RestoreTestRow.begun_at, RestoreTestRow.test)).mappings()
        return [record(RestoreTest, row) for row in rows]

    @reads
    def history(self, connection: Connection, cluster: str, since: float) -> tuple[list[Attempt], list[Generation]]:
        """Return the attempts on a cluster (`Run.domain`) that ran since a time, and failed generations of its runs."""
        of_cluster = _select_domain_runs(cluster)
        lived = AttemptRow.started_at.is_not(None) & (AttemptRow.ended_at.is_(None) | (AttemptRow.ended_at >= since))
        attempts = select(AttemptRow.__table__).where(AttemptRow.run.in_(of_cluster) & lived)
        failed_generations = GenerationRow.failure.is_not(None) & (GenerationRow.started_at >= since)
        generations = select(GenerationRow.__table__).where(GenerationRow.run.in_(of_cluster) & failed_generations)
        return (
            [record(Attempt, row) for row in connection.execute(attempts).mappings()],
            [record(Generation, row) for row in connection.execute(generations).mappings()],
        )

    @reads
    def transitions(self, connection: Connection, run: str) -> list[Transition]:
        """Return all state changes of a run, its attempts and its checkpoints, in the order of recording."""
        return find_rows(connection, TransitionRow, Transition, "id", run=run)

    @reads
    def changes_after(self, connection: Connection, number: int, since: float) -> list[tuple[int, str]]:
        """Return numbers and run names of run state changes after `number`, since a time."""
        wanted = (TransitionRow.id > number) & (TransitionRow.kind == "run") & (TransitionRow.time >= since)
        query = select(TransitionRow.id, TransitionRow.run).where(wanted).order_by(TransitionRow.id)
        return [(row.id, row.run) for row in connection.execute(query)]

    @reads
    def notices(self, connection: Connection, run: str) -> list[Notice]:
        """Return the notices of a run's attempts, oldest first."""
        return find_rows(connection, NoticeRow, Notice, "time, attempt, source, seq", run=run)

    @reads
    def cluster_notices(self, connection: Connection, cluster: str, kinds: Iterable[str], since: float) -> list[Notice]:
        """Return the notices of these kinds in all runs of a cluster since a time, oldest first."""
        of_cluster = _select_domain_runs(cluster)
        wanted = NoticeRow.kind.in_(sorted(kinds)) & (NoticeRow.time >= since) & NoticeRow.run.in_(of_cluster)
        order = (NoticeRow.time, NoticeRow.run, NoticeRow.attempt, NoticeRow.source, NoticeRow.seq)
        query = select(NoticeRow.__table__).where(wanted).order_by(*order)
        return [record(Notice, row) for row in connection.execute(query).mappings()]

    @reads
    def nodes(self, connection: Connection) -> list[Node]:
        """Return every node seen, by cluster and name."""
        return find_rows(connection, NodeRow, Node, "cluster, name")

    @reads
    def config(self, connection: Connection, digest: str) -> dict[str, Any]:
        """Return the resolved config with this digest, converted to the keys of this version.

        Raises NotFound, or RegistryError if its bytes are damaged.
        """
        text = connection.execute(select(ConfigRow.data).where(ConfigRow.digest == digest)).scalar()
        if text is None:
            raise NotFound(f"no config {digest}", hint="`orch show RUN` tells a run's digest")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise RegistryError(f"config {digest} is damaged: its bytes do not match", where=str(self.database.path))
        return in_present_keys(json.loads(text))

    @reads
    def config_digests(self, connection: Connection) -> set[str]:
        """Return the digests of all configs."""
        return set(connection.execute(select(ConfigRow.digest)).scalars())

    @reads
    def leases(self, connection: Connection) -> list[Lease]:
        """Return each scheduler instance's lease, newest first, including expired and dropped (no holder) ones."""
        return find_rows(connection, LeaseRow, Lease, "holder = '', renewed_at DESC, epoch DESC")

    def lease(self, scheduler: str | None = None) -> Lease | None:
        """Return the lease for a scheduler instance's runs, or of the last controller alive; None before the first."""
        found = self.leases()
        return next(iter(found), None) if scheduler is None else covering_lease(found, scheduler)

    @reads
    def user_requests(self, connection: Connection, pending: bool = True) -> list[UserRequest]:
        """Return the requests of people, oldest first; with `pending` only unanswered ones."""
        query = select(UserRequestRow.__table__).order_by(UserRequestRow.id)
        if pending:
            query = query.where(UserRequestRow.answered_at.is_(None))
        return [record(UserRequest, row) for row in connection.execute(query).mappings()]

    @reads
    def cursor(self, connection: Connection, run: str, file: str) -> int:
        """Return the offset from which an event file of the run is unread."""
        wanted = (CursorRow.run == run) & (CursorRow.file == file)
        return connection.execute(select(CursorRow.offset).where(wanted)).scalar() or 0

    @reads
    def cursors(self, connection: Connection, run: str) -> dict[str, int]:
        """Return the read offset of every event file of a run."""
        rows = connection.execute(select(CursorRow.file, CursorRow.offset).where(CursorRow.run == run))
        return {row.file: row.offset for row in rows}


def _select_domain_runs(domain: str) -> Select[Any]:
    """Select the names of one scheduler's runs; runs without a known scheduler match by kind."""
    alone = (RunRow.scheduler == "") & (RunRow.cluster == domain)
    return select(RunRow.name).where((RunRow.scheduler == domain) | alone)


def _resolve_name(connection: Connection, name: str) -> str:
    """Return the whole name; a prefix matches restore tests only if it matches no other run."""
    if first_row(connection, RunRow, Run, name=name) is not None:
        return name
    no_test = ~exists().where(RestoreTestRow.test == RunRow.name)
    names = select(RunRow.name).order_by(RunRow.id.desc())
    if name == "@last":
        newest = connection.execute(names.where(no_test).limit(1)).scalar()
        if newest is None:
            raise NotFound("there is no run yet", hint="`orch submit tiny-gpt` starts one")
        return newest
    starts = names.where(func.substr(RunRow.name, 1, len(name)) == name if name else false()).limit(6)
    matches = list(connection.execute(starts.where(no_test)).scalars()) or list(connection.execute(starts).scalars())
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(matches[:5]) + (", ..." if len(matches) > 5 else "")
        raise NotFound(f"several runs begin with {name}: {shown}", hint="type more of the name")
    run, mark, _ = name.rpartition("@")
    if run and mark:
        raise RunExpected(name, _resolve_name(connection, run))
    if "/" in name:  # its folder, or a path inside it
        parts = list(reversed(Path(os.path.abspath(os.path.expanduser(name))).parts))
        known = set(connection.execute(select(RunRow.name).where(RunRow.name.in_(parts))).scalars())
        meant = next((part for part in parts if part in known), None)
        if meant is not None:
            raise NotFound(f"{name} is a path, and the name of a run is needed", hint=f"did you mean {meant}?")
        name = parts[0]
    near = difflib.get_close_matches(name, connection.execute(names.limit(1000)).scalars().all(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`orch status -n 50` lists the newest runs"
    raise NotFound(f"no run {' '.join(name.split())}", hint=hint)
