"""Conversion between rows and records."""

import functools
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, Insert, RowMapping, Select, Table, Update, bindparam, select, text
from sqlalchemy.dialects.sqlite import insert as insert_or

from orchestrator.errors import NotFound
from orchestrator.registry.models import AttemptRow, Base, CheckpointRow, GenerationRow, RunRow, TransitionRow
from orchestrator.registry.records import Attempt, Checkpoint, Generation, Run

R = TypeVar("R")
TOUCHED = "orch_touched"
"""Key under which a connection keeps the names of the runs that its transaction has changed."""


def record(kind: type[R], row: RowMapping) -> R:
    """Return the record of a row; columns without a field are omitted."""
    return kind(**{item.name: row[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def find_rows(connection: Connection, model: type[Base], kind: type[R], order: str = "", **keys: Any) -> list[R]:
    """Return the records of the rows with these values, in the order of these columns."""
    found = connection.execute(_selection(model, order, *keys), keys)
    return [record(kind, row) for row in found.mappings()]


def first_row(connection: Connection, model: type[Base], kind: type[R], **keys: Any) -> R | None:
    """Return the record of the row with these values, or None."""
    row = connection.execute(_selection(model, "", *keys), keys).mappings().first()
    return None if row is None else record(kind, row)


def alter_rows(connection: Connection, model: type[Base], changes: dict[str, Any], **keys: Any) -> None:
    """Change the rows with these values."""
    connection.execute(_alteration(model, *keys), {**changes, **{f"of_{key}": value for key, value in keys.items()}})


# Each statement is built once and gets its values as parameters: to build one takes longer than to execute it.


@functools.cache
def _selection(model: type[Base], order: str, *keys: str) -> Select[Any]:
    table = _table(model)
    query = select(table).where(*(table.c[key] == bindparam(key) for key in keys))
    return query.order_by(text(order)) if order else query


@functools.cache
def _alteration(model: type[Base], *keys: str) -> Update:
    table = _table(model)
    return table.update().where(*(table.c[key] == bindparam(f"of_{key}") for key in keys))


@functools.cache
def insertion(model: type[Base], kept: bool = False) -> Insert:
    """Return the statement that inserts a row; `kept`: an existing one stays as it is."""
    table = _table(model)
    return insert_or(table).on_conflict_do_nothing() if kept else table.insert()


@functools.cache
def replacement(model: type[Base], *keys: str) -> Insert:
    """Return the statement that inserts a row, or changes the one with the same keys."""
    row = insert_or(_table(model))
    rest = {column.name: row.excluded[column.name] for column in _table(model).columns if column.name not in keys}
    return row.on_conflict_do_update(index_elements=keys, set_=rest)


def _table(model: type[Base]) -> Table:
    return Base.metadata.tables[model.__tablename__]


def check_columns(model: type[Base], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `changes` for an UPDATE, asserting that each name is a column outside the row's identity."""
    keys = {column.name for column in model.__table__.primary_key} | {"id", "name", "run", "state"}
    unknown = set(changes) - ({column.name for column in model.__table__.columns} - keys)
    assert not unknown, f"{model.__tablename__} has no {sorted(unknown)} to change"
    return changes


def the_run(connection: Connection, run: str) -> Run:
    """Return the run with exactly this name. Raises NotFound."""
    found = first_row(connection, RunRow, Run, name=run)
    if found is None:
        raise NotFound(f"no run {run}", hint="`orch status` lists the runs")
    return found


def the_attempt(connection: Connection, run: str, number: int) -> Attempt:
    """Return an attempt. Raises NotFound."""
    found = first_row(connection, AttemptRow, Attempt, run=run, number=number)
    if found is None:
        raise NotFound(f"run {run} has no attempt {number}", hint=f"`orch show {run}` lists its attempts")
    return found


def the_checkpoint(connection: Connection, run: str, name: str) -> Checkpoint:
    """Return a checkpoint. Raises NotFound."""
    found = first_row(connection, CheckpointRow, Checkpoint, run=run, name=name)
    if found is None:
        raise NotFound(f"run {run} has no checkpoint {name}", hint=f"`orch ckpt ls {run}` lists them")
    return found


def alter_run(connection: Connection, run: str, **changes: Any) -> None:
    alter_rows(connection, RunRow, changes, name=run)


def alter_attempt(connection: Connection, run: str, number: int, **changes: Any) -> None:
    alter_rows(connection, AttemptRow, changes, run=run, number=number)


def alter_checkpoint(connection: Connection, run: str, name: str, **changes: Any) -> None:
    alter_rows(connection, CheckpointRow, changes, run=run, name=name)


def generation_rows(connection: Connection, run: str, attempt: int | None) -> list[Generation]:
    """Return the generations of a run or of one attempt, oldest first."""
    keys = {"run": run} if attempt is None else {"run": run, "attempt": attempt}
    return find_rows(connection, GenerationRow, Generation, "attempt, number", **keys)


def note_transition(
    connection: Connection, run: str, kind: str, subject: str, before: str, after: str, reason: str, time: float
) -> None:
    """Record a change of state with its reason; the run's record file is due after the commit."""
    connection.info.setdefault(TOUCHED, set()).add(run)
    values = {"run": run, "kind": kind, "subject": subject, "before": before, "after": after}
    connection.execute(insertion(TransitionRow), {**values, "reason": reason, "time": time})
