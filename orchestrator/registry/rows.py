"""Conversion between rows and records."""

from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, insert, select, update

from orchestrator.errors import NotFound
from orchestrator.registry.models import AttemptRow, Base, CheckpointRow, GenerationRow, RunRow, TransitionRow
from orchestrator.registry.records import Attempt, Checkpoint, Generation, Run

R = TypeVar("R")
TOUCHED = "orch_touched"
"""Key under which a connection keeps the names of the runs that its transaction has changed."""


def record(kind: type[R], row: RowMapping) -> R:
    """Return the record of a row; columns without a field are omitted."""
    return kind(**{item.name: row[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def check_columns(model: type[Base], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `changes` for an UPDATE, asserting that each name is a column outside the row's identity."""
    keys = {column.name for column in model.__table__.primary_key} | {"id", "name", "run", "state"}
    unknown = set(changes) - ({column.name for column in model.__table__.columns} - keys)
    assert not unknown, f"{model.__tablename__} has no {sorted(unknown)} to change"
    return changes


def the_run(connection: Connection, run: str) -> Run:
    """Return the run with exactly this name. Raises NotFound."""
    row = connection.execute(select(RunRow.__table__).where(RunRow.name == run)).mappings().first()
    if row is None:
        raise NotFound(f"no run {run}", hint="`orch status` lists the runs")
    return record(Run, row)


def the_attempt(connection: Connection, run: str, number: int) -> Attempt:
    """Return an attempt. Raises NotFound."""
    wanted = (AttemptRow.run == run) & (AttemptRow.number == number)
    row = connection.execute(select(AttemptRow.__table__).where(wanted)).mappings().first()
    if row is None:
        raise NotFound(f"run {run} has no attempt {number}", hint=f"`orch show {run}` lists its attempts")
    return record(Attempt, row)


def the_checkpoint(connection: Connection, run: str, name: str) -> Checkpoint:
    """Return a checkpoint. Raises NotFound."""
    wanted = (CheckpointRow.run == run) & (CheckpointRow.name == name)
    row = connection.execute(select(CheckpointRow.__table__).where(wanted)).mappings().first()
    if row is None:
        raise NotFound(f"run {run} has no checkpoint {name}", hint=f"`orch ckpt ls {run}` lists them")
    return record(Checkpoint, row)


def alter_run(connection: Connection, run: str, **changes: Any) -> None:
    connection.execute(update(RunRow).where(RunRow.name == run).values(**changes))


def alter_attempt(connection: Connection, run: str, number: int, **changes: Any) -> None:
    wanted = (AttemptRow.run == run) & (AttemptRow.number == number)
    connection.execute(update(AttemptRow).where(wanted).values(**changes))


def alter_checkpoint(connection: Connection, run: str, name: str, **changes: Any) -> None:
    wanted = (CheckpointRow.run == run) & (CheckpointRow.name == name)
    connection.execute(update(CheckpointRow).where(wanted).values(**changes))


def generation_rows(connection: Connection, run: str, attempt: int | None) -> list[Generation]:
    """Return the generations of a run or of one attempt, oldest first."""
    query = select(GenerationRow.__table__).where(GenerationRow.run == run)
    if attempt is not None:
        query = query.where(GenerationRow.attempt == attempt)
    rows = connection.execute(query.order_by(GenerationRow.attempt, GenerationRow.number)).mappings()
    return [record(Generation, row) for row in rows]


def note_transition(
    connection: Connection, run: str, kind: str, subject: str, before: str, after: str, reason: str, time: float
) -> None:
    """Record a change of state with its reason; the run's record file is due after the commit."""
    connection.info.setdefault(TOUCHED, set()).add(run)
    values = {"run": run, "kind": kind, "subject": subject, "before": before, "after": after}
    connection.execute(insert(TransitionRow).values(**values, reason=reason, time=time))
