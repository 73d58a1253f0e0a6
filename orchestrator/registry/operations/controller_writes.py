"""Registry writes of the controller, leases included; each checks its fencing epoch."""

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, case, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert as insert_or

from orchestrator.errors import Fenced, ForeignRun
from orchestrator.registry.database import StoreOperations, writes
from orchestrator.registry.models import (
    AttemptRow,
    CheckpointRow,
    CopyRow,
    CursorRow,
    GenerationRow,
    LeaseRow,
    NodeRow,
    NoticeRow,
    RestoreTestRow,
    RunRow,
    SubmissionRow,
    UserRequestRow,
)
from orchestrator.registry.operations.user_writes import put_intent
from orchestrator.registry.records import Attempt, Checkpoint, CheckpointCopy, Generation, Lease, Node, Notice, Run
from orchestrator.registry.rows import (
    TOUCHED,
    alter_attempt,
    alter_checkpoint,
    alter_rows,
    alter_run,
    check_columns,
    find_rows,
    first_row,
    insertion,
    note_transition,
    replacement,
    the_attempt,
    the_checkpoint,
    the_run,
)
from orchestrator.states import AttemptState, RunState, Trust, may_move

NOBODY = ""
"""Holder of a dropped lease."""
ALL_RUNS = ""
"""Scheduler of a lease for all runs, used by `orch db rebuild` and by controllers of older versions."""


class LeaseWrites(StoreOperations):
    """Acquisition, renewal and release of the lease of one scheduler instance."""

    @writes
    def take_lease(
        self,
        connection: Connection,
        holder: str,
        now: float,
        ttl: float,
        scheduler: str = ALL_RUNS,
        over: Sequence[Lease] | None = None,
    ) -> Lease | None:
        """Return the lease if it is free, expired or already this holder's; None while another holder is alive.

        `over`: leases that the caller has watched long enough to know that their holders stall, whatever this host's
        clock shows. If given, only these leases count as expired, and only if unchanged. A new holder gets an epoch
        above all others, which fences its predecessor. The lease for all runs and a single scheduler's lease exclude
        each other.
        """
        assert holder, "a lease needs a holder"
        others = [
            row for row in _rows(connection) if scheduler in (ALL_RUNS, row.scheduler) or row.scheduler == ALL_RUNS
        ]
        if any(is_live(row, now, over) for row in others if row.holder not in (NOBODY, holder)):
            return None
        fields = {"holder": holder, "renewed_at": now, "expires_at": now + ttl}
        held = next((row for row in others if row.scheduler == scheduler), None)
        for row in others:
            if row is not held:
                _set(connection, row.epoch, holder=NOBODY, expires_at=0.0)
        newest = connection.execute(select(func.coalesce(func.max(LeaseRow.epoch), 0))).scalar_one()
        if held is None:
            values = {"epoch": newest + 1, "ticked_at": 0.0, "scheduler": scheduler, **fields}
            connection.execute(insertion(LeaseRow), values)
            return _current(connection, newest + 1)
        epoch = held.epoch if held.holder == holder else newest + 1
        _set(connection, held.epoch, epoch=epoch, **fields)
        return _current(connection, epoch)

    @writes
    def renew_lease(self, connection: Connection, lease: Lease, now: float, ttl: float) -> Lease:
        """Extend the lease by `ttl` seconds. Raises Fenced if it is lost."""
        fence(connection, lease.epoch)
        _set(connection, lease.epoch, renewed_at=now, expires_at=now + ttl)
        renewed = _current(connection, lease.epoch)
        assert renewed is not None
        return renewed

    @writes
    def drop_lease(self, connection: Connection, lease: Lease) -> None:
        """Give up the lease; does nothing if another controller has taken it."""
        held = _current(connection, lease.epoch)
        if held is not None and held.holder == lease.holder:
            _set(connection, lease.epoch, holder=NOBODY, expires_at=0.0)

    @writes
    def note_tick(self, connection: Connection, lease: Lease, now: float) -> None:
        """Record the end of a whole pass over the runs. Raises Fenced if the lease is lost."""
        fence(connection, lease.epoch)
        _set(connection, lease.epoch, ticked_at=now)


def is_live(held: Lease, now: float, over: Sequence[Lease] | None) -> bool:
    """Return whether a held lease excludes other controllers (`over` as in `take_lease`)."""
    if over is None:
        return held.expires_at > now
    return (held.epoch, held.renewed_at) not in {(watched.epoch, watched.renewed_at) for watched in over}


def fence(connection: Connection, epoch: int, run: str | None = None) -> Lease:
    """Raise Fenced if the epoch's lease is not held, and ForeignRun if the run belongs to another scheduler.

    An expired lease passes until it is taken; this check and the write share a transaction.
    """
    held = _current(connection, epoch)
    if held is None or held.holder == NOBODY:
        live = [f"epoch {row.epoch} is in force" for row in _rows(connection) if row.holder != NOBODY]
        raise Fenced(f"a controller with epoch {epoch} may not write: {', '.join(live) or 'nobody holds the lease'}")
    if run is not None and held.scheduler != ALL_RUNS:
        owned = first_row(connection, RunRow, Run, name=run)
        if owned is not None and owned.scheduler not in ("", held.scheduler):
            raise ForeignRun(f"the controller of {held.scheduler} may not write: {run} belongs to {owned.scheduler}")
    return held


def _rows(connection: Connection) -> list[Lease]:
    return find_rows(connection, LeaseRow, Lease)


def _current(connection: Connection, epoch: int) -> Lease | None:
    """Return the lease with this epoch, which is unique."""
    return first_row(connection, LeaseRow, Lease, epoch=epoch)


def _set(connection: Connection, of_epoch: int, **changes: object) -> None:
    alter_rows(connection, LeaseRow, changes, epoch=of_epoch)


class ControllerWrites(StoreOperations):
    """Writes of the lease's holder; all are idempotent."""

    @writes
    def move_run(
        self, connection: Connection, /, run: str, to: RunState, reason: str, *, epoch: int, now: float, **changes: Any
    ) -> None:
        """Change a run's state and record the reason; in the same state, only `changes` are applied."""
        fence(connection, epoch, run)
        before = the_run(connection, run).state
        values = check_columns(RunRow, changes)
        if _moves(before, to, f"run {run}"):
            values = {"reason": reason, **values, "state": to}
            note_transition(connection, run, "run", run, before, to, reason, now)
        if values:
            alter_run(connection, run, **{"updated_at": now, **values})

    @writes
    def move_attempt(
        self,
        connection: Connection,
        /,
        run: str,
        number: int,
        to: AttemptState,
        reason: str,
        *,
        epoch: int,
        now: float,
        **changes: Any,
    ) -> None:
        """Change an attempt's state and record the reason; in the same state, only `changes` are applied."""
        fence(connection, epoch, run)
        before = the_attempt(connection, run, number).state
        values = check_columns(AttemptRow, changes)
        if _moves(before, to, f"attempt {run}/{number}"):
            values = {"reason": reason, **values, "state": to}
            note_transition(connection, run, "attempt", str(number), before, to, reason, now)
        if values:
            alter_attempt(connection, run, number, **values)

    @writes
    def claim_run(self, connection: Connection, run: str, scheduler: str, *, epoch: int, before: str = "") -> bool:
        """Assign a run from `before` (empty: unassigned) to this scheduler; return whether it belongs to it now.

        Attempts without a scheduler follow the run, and so do node records under an older version's cluster name.
        """
        fence(connection, epoch)
        row = the_run(connection, run)
        if row.scheduler not in (before, scheduler):
            return False
        if not row.scheduler:
            _keep_nodes(connection, row.cluster, scheduler)
        alter_run(connection, run, scheduler=scheduler)
        connection.info.setdefault(TOUCHED, set()).add(run)  # its record contains the scheduler
        alter_rows(connection, AttemptRow, {"scheduler": scheduler}, run=run, scheduler="")
        return True

    @writes
    def note_run(self, connection: Connection, /, run: str, *, epoch: int, now: float, **changes: Any) -> None:
        """Change fields of a run other than its state."""
        fence(connection, epoch, run)
        the_run(connection, run)
        alter_run(connection, run, **{"updated_at": now, **check_columns(RunRow, changes)})

    @writes
    def note_notified(self, connection: Connection, run: str, notified: dict[str, Any], *, epoch: int) -> None:
        """Record the notifications of a run's changes; its time of update does not change."""
        fence(connection, epoch, run)
        alter_run(connection, run, notified=notified)
        connection.info.setdefault(TOUCHED, set()).add(run)

    @writes
    def note_attempt(self, connection: Connection, /, run: str, number: int, *, epoch: int, **changes: Any) -> None:
        """Change fields of an attempt other than its state."""
        fence(connection, epoch, run)
        the_attempt(connection, run, number)
        if changes:
            alter_attempt(connection, run, number, **check_columns(AttemptRow, changes))

    @writes
    def add_attempt(
        self, connection: Connection, /, run: str, *, nonce: str, excluded: tuple[str, ...], epoch: int, now: float,
        reason: str = "next attempt", **changes: Any,
    ) -> Attempt:  # fmt: skip
        """Add the intent of the run's next attempt; `changes` override fields taken from its run."""
        fence(connection, epoch, run)
        the_run(connection, run)
        query = select(func.coalesce(func.max(AttemptRow.number), 0)).where(AttemptRow.run == run)
        number = connection.execute(query).scalar_one() + 1
        put_intent(connection, run, number, nonce=nonce, excluded=excluded, epoch=epoch, reason=reason, now=now)
        if changes:
            alter_attempt(connection, run, number, **check_columns(AttemptRow, changes))
        return the_attempt(connection, run, number)

    @writes
    def put_generation(self, connection: Connection, generation: Generation, *, epoch: int) -> None:
        """Insert or update a generation, and the attempt's count of generations."""
        fence(connection, epoch, generation.run)
        connection.execute(replacement(GenerationRow, "run", "attempt", "number"), dict(generation.__dict__))
        wanted = (GenerationRow.run == generation.run) & (GenerationRow.attempt == generation.attempt)
        count = connection.execute(select(func.count()).select_from(GenerationRow).where(wanted)).scalar_one()
        alter_attempt(connection, generation.run, generation.attempt, generations=count)

    @writes
    def put_notice(self, connection: Connection, notice: Notice, *, epoch: int) -> None:
        """Insert a notice; an existing one is kept."""
        fence(connection, epoch, notice.run)
        connection.execute(insertion(NoticeRow, kept=True), dict(notice.__dict__))

    @writes
    def put_checkpoint(self, connection: Connection, checkpoint: Checkpoint, *, epoch: int) -> None:
        """Insert a checkpoint; an existing one is kept."""
        fence(connection, epoch, checkpoint.run)
        if connection.execute(insertion(CheckpointRow, kept=True), dict(checkpoint.__dict__)).rowcount:
            reason = checkpoint.reason or f"written by attempt {checkpoint.attempt}"
            note_transition(
                connection, checkpoint.run, "checkpoint", checkpoint.name, "", checkpoint.trust, reason,
                checkpoint.committed_at,
            )  # fmt: skip

    @writes
    def put_copy(self, connection: Connection, copy: CheckpointCopy, *, epoch: int) -> None:
        """Record a copy of a known checkpoint in a further tier."""
        fence(connection, epoch, copy.run)
        the_checkpoint(connection, copy.run, copy.name)
        connection.execute(insertion(CopyRow, kept=True), dict(copy.__dict__))

    @writes
    def drop_copy(self, connection: Connection, run: str, name: str, tier: str, *, epoch: int) -> None:
        """Delete the record of a copy."""
        fence(connection, epoch, run)
        _drop_copy(connection, run, name, tier)

    @writes
    def move_checkpoint(self, connection: Connection, run: str, name: str, path: str, *, epoch: int) -> None:
        """Record a checkpoint's new path."""
        fence(connection, epoch, run)
        alter_checkpoint(connection, run, name, path=path, tier=os.path.dirname(path))

    @writes
    def rehome(self, connection: Connection, copy: CheckpointCopy, reason: str, *, epoch: int) -> None:
        """Make a copy the checkpoint's main location after the original is gone; its trust is unchanged."""
        fence(connection, epoch, copy.run)
        the_checkpoint(connection, copy.run, copy.name)
        alter_checkpoint(connection, copy.run, copy.name, tier=copy.tier, path=copy.path, reason=reason)
        _drop_copy(connection, copy.run, copy.name, copy.tier)

    @writes
    def trust(
        self, connection: Connection, run: str, name: str, to: Trust, reason: str, *, epoch: int, now: float
    ) -> None:
        """Change a checkpoint's trust and record the reason."""
        fence(connection, epoch, run)
        before = the_checkpoint(connection, run, name).trust
        if _moves(before, to, f"checkpoint {run}/{name}"):
            alter_checkpoint(connection, run, name, trust=to, reason=reason)
            note_transition(connection, run, "checkpoint", name, before, to, reason, now)

    @writes
    def end_restore_test(
        self, connection: Connection, test: str, verdict: str, reason: str, evidence: dict[str, Any], *,
        epoch: int, now: float,
    ) -> None:  # fmt: skip
        """Record the end of a restore test; the first verdict is kept. The tested run's controller may write it."""
        fence(connection, epoch)
        wanted = (RestoreTestRow.test == test) & RestoreTestRow.ended_at.is_(None)
        values = {"verdict": verdict, "reason": reason, "evidence": evidence, "ended_at": now}
        connection.execute(update(RestoreTestRow).where(wanted).values(**values))
        connection.info.setdefault(TOUCHED, set()).add(test)

    @writes
    def saw_node(
        self, connection: Connection, name: str, cluster: str, *, epoch: int, now: float, failure: str | None = None
    ) -> None:
        """Count another attempt on a node or, with `failure`, a failure on it."""
        if failure is None:
            values: dict[str, Any] = {"attempts": NodeRow.attempts + 1}
        else:
            # While a node is excluded, the reason for that is kept.
            reason = case((NodeRow.excluded_until > now, NodeRow.reason), else_=failure)
            values = {"failures": NodeRow.failures + 1, "reason": reason}
        fence(connection, epoch)
        _alter_node(connection, name, cluster, now, values)

    @writes
    def exclude_node(
        self, connection: Connection, name: str, cluster: str, until: float, reason: str, *, epoch: int, now: float
    ) -> None:
        """Exclude a node until a time (`now` ends the exclusion) and record the reason."""
        fence(connection, epoch)
        _alter_node(connection, name, cluster, now, {"excluded_until": until, "reason": reason})

    @writes
    def prolong_exclusion(
        self, connection: Connection, name: str, cluster: str, before: float, until: float, *, epoch: int, now: float
    ) -> None:
        """Extend a node's exclusion if it still ends at `before`."""
        fence(connection, epoch)
        wanted = (NodeRow.cluster == cluster) & (NodeRow.name == name) & (NodeRow.excluded_until == before)
        connection.execute(update(NodeRow).where(wanted).values(excluded_until=until))

    @writes
    def release_node(
        self, connection: Connection, name: str, cluster: str, reason: str, *, epoch: int, now: float
    ) -> None:
        """End a node's exclusion and reset its failures."""
        fence(connection, epoch)
        _alter_node(connection, name, cluster, now, {"excluded_until": now, "reason": reason, "failures": 0})

    @writes
    def add_submission(self, connection: Connection, run: str, attempt: int, *, epoch: int, now: float) -> int:
        """Record that the attempt's job is about to be submitted; return the submission's number."""
        fence(connection, epoch)
        wanted = (SubmissionRow.run == run) & (SubmissionRow.attempt == attempt)
        query = select(func.coalesce(func.max(SubmissionRow.number), 0)).where(wanted)
        number = int(connection.execute(query).scalar_one()) + 1
        values = {"run": run, "attempt": attempt, "number": number, "submitted_at": now, "outcome": ""}
        connection.execute(insertion(SubmissionRow), values)
        return number

    @writes
    def note_submission(
        self, connection: Connection, /, run: str, attempt: int, number: int, *, epoch: int, **changes: Any
    ) -> None:
        """Record the outcome or job id of a submission."""
        fence(connection, epoch)
        changes = check_columns(SubmissionRow, changes)
        alter_rows(connection, SubmissionRow, changes, run=run, attempt=attempt, number=number)

    @writes
    def set_cursor(self, connection: Connection, run: str, file: str, offset: int, *, epoch: int) -> None:
        """Record the offset up to which an event file has been read."""
        fence(connection, epoch, run)
        connection.execute(replacement(CursorRow, "run", "file"), {"run": run, "file": file, "offset": offset})

    @writes
    def answer(self, connection: Connection, request_id: int, answer: str, *, epoch: int, now: float) -> None:
        """Answer a request; the first answer is kept."""
        wanted = (UserRequestRow.id == request_id) & UserRequestRow.answered_at.is_(None)
        fence(connection, epoch, connection.execute(select(UserRequestRow.run).where(wanted)).scalar())
        connection.execute(update(UserRequestRow).where(wanted).values(answer=answer, answered_at=now))


def _alter_node(connection: Connection, name: str, cluster: str, now: float, values: dict[str, Any]) -> None:
    """Change a node's row, inserting it if the node is new."""
    fresh = {"attempts": 0, "failures": 0, "excluded_until": 0.0, "reason": ""}
    seen_now = {"cluster": cluster, "name": name, "first_seen": now, "last_seen": now}
    connection.execute(insertion(NodeRow, kept=True), {**seen_now, **fresh})
    wanted = (NodeRow.cluster == cluster) & (NodeRow.name == name)
    seen = func.max(NodeRow.last_seen, now)
    connection.execute(update(NodeRow).where(wanted).values(last_seen=seen, **values))


def _keep_nodes(connection: Connection, old: str, new: str) -> None:
    """Copy the node records from the cluster's old name to its new one; the later exclusion is kept."""
    for node in find_rows(connection, NodeRow, Node, cluster=old):
        row = insert_or(NodeRow).values(**{**node.__dict__, "cluster": new})
        given, later = row.excluded, row.excluded.excluded_until > NodeRow.excluded_until
        kept = {
            "excluded_until": func.max(NodeRow.excluded_until, given.excluded_until),
            "reason": case((later, given.reason), else_=NodeRow.reason),
        }
        connection.execute(row.on_conflict_do_update(index_elements=("cluster", "name"), set_=kept))


def _drop_copy(connection: Connection, run: str, name: str, tier: str) -> None:
    wanted = (CopyRow.run == run) & (CopyRow.name == name) & (CopyRow.tier == tier)
    connection.execute(delete(CopyRow).where(wanted))


def _moves(before: StrEnum, after: StrEnum, subject: str) -> bool:
    if before == after:
        return False
    assert may_move(before, after), f"{subject} may not go from {before} to {after}"
    return True
