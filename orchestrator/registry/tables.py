"""Tables of the registry for SQLAlchemy Core, derived from the records, and the statements used most often.

Statements are built once and get their values as parameters, because building one takes longer than executing it.
"""

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
from sqlalchemy import Column, ColumnElement, Dialect, Select, Table, Text, Update
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.types import TypeDecorator, TypeEngine

from checkpointing.storage.durable import dump_line, number
from orchestrator.registry import records

P = ParamSpec("P")
T = TypeVar("T")


class EncodedField(TypeDecorator[Any]):
    """Field that SQLite stores in another form; None is NULL."""

    impl, cache_ok = Text, True

    def __init__(self, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        super().__init__()
        self.encode, self.decode = encode, decode

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        return lambda value: None if value is None else self.encode(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        return lambda value: None if value is None else self.decode(value)


def _decode_tuple(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text))


def _encode_float(value: float) -> float | str:
    """Return NaN and infinity as text, since SQLite would store NULL for NaN."""
    return value if math.isfinite(value) else json.loads(dump_line(value))


_TYPES: Mapping[Any, TypeEngine[Any]] = {
    str: Text(),
    int: sqlalchemy.Integer(),
    bool: sqlalchemy.Boolean(),
    float: EncodedField(_encode_float, number),
    tuple: EncodedField(dump_line, _decode_tuple),
    dict: EncodedField(dump_line, json.loads),
}


def _column_type(kind: Any) -> TypeEngine[Any]:
    """Return the type of the column for a field of this type; every column accepts NULL here."""
    if typing.get_origin(kind) is types.UnionType:
        return _column_type(typing.get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return EncodedField(str, kind)
    return _TYPES[typing.get_origin(kind) or kind]


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
_METADATA = sqlalchemy.MetaData()


def _make_table(kind: type[Any], name: str) -> Table:
    """Return the table with a column for each field, and SQLite's row number, which grows with time."""
    hints = typing.get_type_hints(kind)
    columns = {"rowid": int} | {item.name: hints[item.name] for item in fields(kind)}
    return Table(name, _METADATA, *(Column(key, _column_type(of)) for key, of in columns.items()))


TABLES: dict[type[Any], Table] = {kind: _make_table(kind, name) for kind, (name, _) in _LAYOUT.items()}
"""Table of each record; `orchestrator/registry/migrate.py` creates them with their keys and indexes."""


def _build_once(build: Callable[P, T]) -> Callable[P, T]:
    """Return `functools.cache` of a function, with the function's types."""
    return typing.cast("Callable[P, T]", functools.cache(build))


@_build_once
def field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


@_build_once
def selection(kind: type[Any], where: tuple[ColumnElement[bool], ...], *keys: str) -> Select[Any]:
    """Return the statement that reads the rows with these values that meet the conditions, in their order."""
    row = TABLES[kind].c
    query = sqlalchemy.select(*(row[name] for name in field_names(kind))).where(*where, *_equal(kind, keys))
    return query.order_by(*_LAYOUT[kind][1](row))


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
    return [TABLES[kind].c[key] == sqlalchemy.bindparam(f"{prefix}{key}") for key in keys]
