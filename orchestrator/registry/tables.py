"""Tables of the registry for SQLAlchemy Core, derived from the records, and the statements used most often."""

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import BindParameter, ClauseElement, ColumnElement, Select, TableClause, Update, bindparam
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from checkpointing.storage.durable import dump_line, number
from orchestrator.registry import records

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_LAYOUT: Mapping[type[Any], tuple[str, Callable[[Any], tuple[ColumnElement[Any], ...]]]] = {
    records.ConfigText: ("configs", lambda row: (row.digest,)),
    records.Run: ("runs", lambda row: (row.rowid.desc(),)),
    records.Attempt: ("attempts", lambda row: (row.run, row.number)),
    records.Submission: ("submissions", lambda row: (row.submitted_at, row.run, row.attempt, row.number)),
    records.Generation: ("generations", lambda row: (row.run, row.attempt, row.number)),
    records.Checkpoint: ("checkpoints", lambda row: (row.step.desc(), row.committed_at.desc(), row.name.desc())),
    records.CheckpointCopy: ("copies", lambda row: (row.run, row.name, row.tier)),
    records.Notice: ("notices", lambda row: (row.time, row.run, row.attempt, row.source, row.seq)),
    records.RestoreTest: ("restore_tests", lambda row: (row.begun_at, row.test)),
    records.Transition: ("transitions", lambda row: (row.rowid,)),
    records.Node: ("nodes", lambda row: (row.cluster, row.name)),
    records.Lease: ("lease", lambda row: (row.holder == "", row.renewed_at.desc(), row.epoch.desc())),
    records.UserRequest: ("asks", lambda row: (row.id,)),
    records.EventCursor: ("cursors", lambda row: (row.run, row.file)),
}
"""Name of each record's table and the order in which its rows are read; referred tables come first."""


def _build_once(build: Callable[P, T]) -> Callable[P, T]:
    """Return `functools.cache` of a function, with the function's types."""
    return typing.cast("Callable[P, T]", functools.cache(build))


@_build_once
def field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


TABLES: dict[type[Any], TableClause] = {
    kind: sqlalchemy.table(name, *map(sqlalchemy.column, ("rowid", *field_names(kind))))
    for kind, (name, _) in _LAYOUT.items()
}
"""Table of each record, with SQLite's row number, which grows with time."""


@_build_once
def selection(kind: type[Any], where: tuple[ColumnElement[bool], ...], *keys: str) -> Select[Any]:
    """Return the statement that reads up to `limit` rows with these values that meet the conditions, in their order."""
    row = TABLES[kind].c
    query = sqlalchemy.select(*(row[name] for name in field_names(kind))).where(*where, *_equal(kind, keys))
    return query.order_by(*_LAYOUT[kind][1](row)).limit(bindparam("limit"))


@_build_once
def insertion(kind: type[Any], *, keep_existing: bool = False) -> Insert:
    """Return the statement that inserts a row; `keep_existing`: or does nothing."""
    statement = Insert(TABLES[kind])
    return statement.on_conflict_do_nothing() if keep_existing else statement


@_build_once
def replacement(kind: type[Any], *keys: str) -> Insert:
    """Return the statement that inserts a row, or changes the row with the same keys."""
    statement = Insert(TABLES[kind])
    changes = {name: statement.excluded[name] for name in field_names(kind) if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changes)


@_build_once
def alteration(kind: type[Any], *keys: str) -> Update:
    """Return the statement that changes the rows with these values, given as parameters `of_KEY`."""
    return TABLES[kind].update().where(*_equal(kind, keys, "of_"))


@_build_once
def deletion(kind: type[Any], *keys: str) -> sqlalchemy.Delete:
    """Return the statement that deletes the rows with these values."""
    return TABLES[kind].delete().where(*_equal(kind, keys))


def _equal(kind: type[Any], keys: tuple[str, ...], prefix: str = "") -> list[ColumnElement[bool]]:
    return [TABLES[kind].c[key] == bindparam(f"{prefix}{key}") for key in keys]


def is_among(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Return the condition that a column has one of the values in the list parameter `name`."""
    values: BindParameter[Any] = bindparam(name)
    return column.in_(sqlalchemy.select(sqlalchemy.func.json_each(values).table_valued("value").c.value))


_DIALECT = SQLiteDialect_pysqlite(paramstyle="named")


@functools.lru_cache(maxsize=512)
def compile_statement(statement: ClauseElement, names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return the SQL of a statement with these parameters, and its constants by parameter name."""
    compiled = statement.compile(dialect=_DIALECT, column_keys=list(names))
    return str(compiled), {name: value for name, value in compiled.params.items() if name not in names}


def encode(value: Any) -> Any:
    """Return a field's value as SQLite stores it: collections, NaN and infinity as JSON (SQLite makes NaN NULL)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.loads(dump_line(value))
    return dump_line(value) if isinstance(value, dict | tuple | list) else value


_DECODERS: Mapping[Any, Callable[[Any], Any]] = {
    bool: bool, float: number, tuple: lambda text: tuple(json.loads(text)), dict: json.loads,
}  # fmt: skip


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that decodes the values of a field of this type; None if they are stored as they are."""
    if typing.get_origin(kind) is types.UnionType:  # NULL is never decoded
        kind = typing.get_args(kind)[0]
    kind = typing.get_origin(kind) or kind
    return kind if issubclass(kind, StrEnum) else _DECODERS.get(kind)


@_build_once
def _decoders(kind: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    hints = typing.get_type_hints(kind)
    return [(name, decode) for name in field_names(kind) if (decode := _decoder(hints[name])) is not None]


def make_record(kind: type[R], row: tuple[Any, ...]) -> R:
    """Return the record of a row that `selection` read."""
    values = dict(zip(field_names(kind), row, strict=True))
    for name, decode in _decoders(kind):
        if values[name] is not None:
            values[name] = decode(values[name])
    return kind(**values)
