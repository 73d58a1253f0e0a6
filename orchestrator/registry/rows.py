"""Between rows and records."""

from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, insert, select, update

from orchestrator.errors import NotFound
from orchestrator.registry.models import AttemptRow, Base, CheckpointRow, GenerationRow, RunRow, TransitionRow
from orchestrator.registry.records import Attempt, Checkpoint, Generation, Run

R = TypeVar("R")
TOUCHED = "orch_touched"
"""Where a connection keeps the names of the runs whose state its transaction has changed."""


def record(kind: type[R], row: RowMapping) -> R:
    """The record of one row; columns that the record does not have are left out."""
    return kind(**{item.name: row[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def changed(model: type[Base], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` as they may be given to UPDATE; a name that is no column, or is the identity, is a bug of ours."""
    keys = {column.name for column in model.__table__.primary_key} | {"id", "name", "run", "state"}
    unknown = set(changes) - ({column.name for column in model.__table__.columns} - keys)
    assert not unknown, f"{model.__tablename__} has no {sorted(unknown)} to change"
    return changes


def the_run(connection: Connection, run: str) -> Run:
    """The run of exactly this name; raises NotFound."""
    row = connection.execute(select(RunRow.__table__).where(RunRow.name == run)).mappings().first()
    if row is None:
        raise NotFound(f"no run {run}", hint="`orch status` lists the runs")
    return record(Run, row)


def the_attempt(connection: Connection, run: str, number: int) -> Attempt:
    """One attempt; raises NotFound."""
    wanted = (AttemptRow.run == run) & (AttemptRow.number == number)
    row = connection.execute(select(AttemptRow.__table__).where(wanted)).mappings().first()
    if row is None:
        raise NotFound(f"run {run} has no attempt {number}", hint=f"`orch show {run}` lists its attempts")
    return record(Attempt, row)


def the_checkpoint(connection: Connection, run: str, name: str) -> Checkpoint:
    """One checkpoint; raises NotFound."""
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
    """Generations of a run, or of one attempt of it, oldest first."""
    query = select(GenerationRow.__table__).where(GenerationRow.run == run)
    if attempt is not None:
        query = query.where(GenerationRow.attempt == attempt)
    rows = connection.execute(query.order_by(GenerationRow.attempt, GenerationRow.number)).mappings()
    return [record(Generation, row) for row in rows]


def note_transition(
    connection: Connection, run: str, kind: str, subject: str, before: str, after: str, reason: str, time: float
) -> None:
    """Write down one change of state with its reason; the run's record is due once the transaction is committed."""
    connection.info.setdefault(TOUCHED, set()).add(run)
    values = {"run": run, "kind": kind, "subject": subject, "before": before, "after": after}
    connection.execute(insert(TransitionRow).values(**values, reason=reason, time=time))
