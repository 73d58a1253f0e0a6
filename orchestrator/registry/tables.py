"""Tables of the registry for SQLAlchemy Core, derived from the records, and the statements used most often."""

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import (
    BindParameter,
    ClauseElement,
    Column,
    ColumnElement,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    Select,
    Table,
    Text,
    Update,
    bindparam,
)
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.types import TypeEngine

from checkpointing.storage.durable import dump_line, number
from orchestrator.registry import records

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_Columns = Callable[[Any], tuple[ColumnElement[Any], ...]]

_LAYOUT: Mapping[type[Any], tuple[str, str, str, _Columns]] = {
    records.ConfigText: ("configs", "digest", "", lambda row: (row.digest,)),
    records.Run: ("runs", "id", "config_digest -> configs.digest", lambda row: (row.id.desc(),)),
    records.Attempt: ("attempts", "run number", "run -> runs.name", lambda row: (row.run, row.number)),
    records.Submission: (
        "submissions", "run attempt number", "run attempt -> attempts.run attempts.number",
        lambda row: (row.submitted_at, row.run, row.attempt, row.number),
    ),
    records.Generation: (
        "generations", "run attempt number", "run attempt -> attempts.run attempts.number",
        lambda row: (row.run, row.attempt, row.number),
    ),
    records.Checkpoint: (
        "checkpoints", "run name", "run -> runs.name",
        lambda row: (row.step.desc(), row.committed_at.desc(), row.name.desc()),
    ),
    records.CheckpointCopy: (
        "copies", "run name tier", "run name -> checkpoints.run checkpoints.name",
        lambda row: (row.run, row.name, row.tier),
    ),
    records.Notice: (
        "notices", "run attempt source seq", "run attempt -> attempts.run attempts.number",
        lambda row: (row.time, row.run, row.attempt, row.source, row.seq),
    ),
    records.RestoreTest: ("restore_tests", "test", "test -> runs.name", lambda row: (row.begun_at, row.test)),
    records.Transition: ("transitions", "id", "run -> runs.name", lambda row: (row.id,)),
    records.Node: ("nodes", "cluster name", "", lambda row: (row.cluster, row.name)),
    records.Lease: (
        "lease", "id", "", lambda row: (row.holder == "", row.renewed_at.desc(), row.epoch.desc())
    ),
    records.UserRequest: ("asks", "id", "run -> runs.name", lambda row: (row.id,)),
    records.EventCursor: ("cursors", "run file", "run -> runs.name", lambda row: (row.run, row.file)),
}  # fmt: skip
"""Name, primary key, foreign key and order of each record's table. Referenced tables come first.

A primary key `id` that is not a field of the record is SQLite's row number, which grows with time.
"""
_UNIQUE = (("runs", "name"), ("attempts", "job_name"), ("lease", "scheduler"))
_INDEXES = (
    *_UNIQUE, ("runs", "state id"), ("submissions", "submitted_at"), ("checkpoints", "run step"),
    ("transitions", "run id"), ("notices", "kind time"), ("asks", "answered_at"), ("restore_tests", "run begun_at"),
    ("restore_tests", "ended_at"),
)  # fmt: skip


def _build_once(build: Callable[P, T]) -> Callable[P, T]:
    return typing.cast("Callable[P, T]", functools.cache(build))


@_build_once
def field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


_METADATA, _DIALECT = sqlalchemy.MetaData(), SQLiteDialect_pysqlite(paramstyle="named")
_TYPES: Mapping[Any, type[TypeEngine[Any]]] = {int: Integer, bool: Integer, float: Float}  # all others are Text


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) is types.UnionType


def _plain_type(kind: Any) -> Any:
    """Return the type of a field without its parameters and without None."""
    kind = typing.get_args(kind)[0] if _is_optional(kind) else kind
    return typing.get_origin(kind) or kind


def _make_table(kind: type[Any]) -> Table:
    name, key, reference, _ = _LAYOUT[kind]
    hints = typing.get_type_hints(kind)
    fields_of = {field: hints[field] for field in field_names(kind)}
    columns = [
        Column(field, _TYPES.get(_plain_type(of), Text), primary_key=field in key.split(), nullable=_is_optional(of))
        for field, of in ({"id": int} | fields_of if key == "id" else fields_of).items()
    ]
    own, _, others = reference.partition(" -> ")
    references = [ForeignKeyConstraint(own.split(), others.split())] if reference else []
    return Table(name, _METADATA, *columns, *references)


TABLES: dict[type[Any], Table] = {kind: _make_table(kind) for kind in _LAYOUT}


def create_statements() -> Iterator[str]:
    """Yield the statements that create all tables and indexes."""
    for table in _METADATA.sorted_tables:
        yield str(CreateTable(table).compile(dialect=_DIALECT))
    for owner, names in _INDEXES:
        columns = [_METADATA.tables[owner].c[name] for name in names.split()]
        index = Index("_".join(("ix", owner, *names.split())), *columns, unique=(owner, names) in _UNIQUE)
        yield str(CreateIndex(index).compile(dialect=_DIALECT))


@_build_once
def selection(kind: type[Any], where: tuple[ColumnElement[bool], ...], *keys: str) -> Select[Any]:
    """Return the statement that reads, in order, up to `limit` rows that have these keys and meet the conditions."""
    row = TABLES[kind].c
    query = sqlalchemy.select(*(row[name] for name in field_names(kind))).where(*where, *_equal(kind, keys))
    return query.order_by(*_LAYOUT[kind][-1](row)).limit(bindparam("limit"))


@_build_once
def insertion(kind: type[Any], *, keep_existing: bool = False) -> Insert:
    """Return the statement that inserts a row; with `keep_existing`, an existing row stays as it is."""
    statement = Insert(TABLES[kind]).inline()  # without RETURNING
    return statement.on_conflict_do_nothing() if keep_existing else statement


@_build_once
def replacement(kind: type[Any], *keys: str) -> Insert:
    """Return the statement that inserts a row, or changes the row with the same keys."""
    statement = Insert(TABLES[kind]).inline()  # without RETURNING
    changes = {name: statement.excluded[name] for name in field_names(kind) if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changes)


@_build_once
def alteration(kind: type[Any], *keys: str) -> Update:
    """Return the statement that changes the rows with these keys, whose values are the parameters `of_KEY`."""
    return TABLES[kind].update().where(*_equal(kind, keys, "of_"))


@_build_once
def deletion(kind: type[Any], *keys: str) -> sqlalchemy.Delete:
    """Return the statement that deletes the rows with these keys."""
    return TABLES[kind].delete().where(*_equal(kind, keys))


def _equal(kind: type[Any], keys: tuple[str, ...], prefix: str = "") -> list[ColumnElement[bool]]:
    return [TABLES[kind].c[key] == bindparam(f"{prefix}{key}") for key in keys]


def is_among(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Return the condition that a column has one of the values in the list parameter `name`."""
    values: BindParameter[Any] = bindparam(name)
    return column.in_(sqlalchemy.select(sqlalchemy.func.json_each(values).table_valued("value").c.value))


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
    bool: bool, float: number, dict: json.loads,
    tuple: functools.lru_cache(maxsize=1024)(lambda text: tuple(json.loads(text))),
}  # fmt: skip


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that decodes a field's values other than NULL; None if they are stored unchanged."""
    kind = _plain_type(kind)
    return kind if issubclass(kind, StrEnum) else _DECODERS.get(kind)


@_build_once
def _decoders(kind: type[Any]) -> tuple[tuple[str, ...], list[tuple[str, Callable[[Any], Any]]]]:
    """Return the names of a record's fields, and the decoders of those that are not stored unchanged."""
    hints, names = typing.get_type_hints(kind), tuple(field_names(kind))
    return names, [(name, decode) for name in names if (decode := _decoder(hints[name])) is not None]


def make_record(kind: type[R], row: tuple[Any, ...]) -> R:
    """Return the record for a row that `selection` has read."""
    names, decoders = _decoders(kind)
    values = dict(zip(names, row, strict=True))
    for name, decode in decoders:
        if (value := values[name]) is not None:
            values[name] = decode(value)
    return kind(**values)
