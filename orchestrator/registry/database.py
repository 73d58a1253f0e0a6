"""Registry file: connections, transactions, rows as records, and translation of errors."""

import functools
import json
import math
import random
import sqlite3
import threading
import time
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from checkpointing.storage.durable import dump_line, number
from orchestrator.registry import records
from orchestrator.registry.sqlite_errors import explain, is_busy, is_io_error

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound="StoreOperations")

TABLES: Mapping[type[Any], str] = {
    records.Run: "runs",
    records.Attempt: "attempts",
    records.Submission: "submissions",
    records.Generation: "generations",
    records.Checkpoint: "checkpoints",
    records.CheckpointCopy: "copies",
    records.Notice: "notices",
    records.RestoreTest: "restore_tests",
    records.Transition: "transitions",
    records.Node: "nodes",
    records.Lease: "lease",
    records.UserRequest: "asks",
}
"""Table of each record; its columns have the names of the record's fields."""
KEEP_EXISTING = "ON CONFLICT DO NOTHING"
_BUSY_SECONDS = 5.0
"""SQLite's own timeout for a lock, per statement."""


class Database:
    """Transaction runner: reads see one snapshot, writes take the lock at once, and busy ones are retried."""

    def __init__(
        self, path: Path, *, readonly: bool = False, patience: float = 30.0, busy_seconds: float = _BUSY_SECONDS
    ) -> None:
        self.path, self._patience = path, patience
        self.after_commit: Callable[[set[str]], None] = lambda runs: None
        self._connect = functools.partial(connect, path, readonly=readonly, busy_seconds=busy_seconds)
        self._idle: list[sqlite3.Connection] = []
        self._active = threading.local()

    def read(self, work: Callable[[], T]) -> T:
        """Run `work`, including the reads it calls, on one snapshot."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[], T]) -> T:
        """Run `work` in one BEGIN IMMEDIATE transaction; all of it is repeated if the registry is busy."""
        return self._run(work, writes=True)

    def _run(self, work: Callable[[], T], *, writes: bool) -> T:
        if getattr(self._active, "connection", None) is not None:
            assert self._active.writes or not writes, "a write within a read: its lock would come too late"
            return work()
        give_up = time.monotonic() + self._patience
        while True:
            try:
                result, touched = self._once(work, writes=writes)
            except sqlite3.IntegrityError:
                raise
            except sqlite3.Error as error:
                if is_io_error(error):
                    self.close()  # the next transaction connects anew
                if not is_busy(error) or time.monotonic() > give_up:
                    raise explain(error, self.path) from error
                time.sleep(random.uniform(0.01, 0.1))
            else:
                if touched:
                    self.after_commit(touched)
                return result

    def _once(self, work: Callable[[], T], *, writes: bool) -> tuple[T, set[str]]:
        """Return the result and the runs that changed."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            # A deferred BEGIN that turns into a write fails at once if another writer came first.
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            self._active.connection, self._active.writes, self._active.touched = connection, writes, set[str]()
            result = work()
            connection.execute("COMMIT")
            return result, self._active.touched
        finally:
            self._active.connection = None
            with suppress(sqlite3.Error):
                connection.rollback()  # does nothing after a commit
            self._idle.append(connection)

    def touch(self, run: str) -> None:
        """Note that the run's record file is due after the commit."""
        self._active.touched.add(run)

    def execute(self, statement: str, values: tuple[Any, ...] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Execute a statement within the transaction of this thread."""
        connection: sqlite3.Connection = self._active.connection
        return connection.execute(statement, values)

    def find(self, kind: type[R], tail: str = "", *values: Any) -> list[R]:
        """Return the records of the rows that `tail` (WHERE, ORDER BY) selects."""
        columns = _columns(TABLES[kind])
        return [
            kind(**{
                name: value if value is None or decode is None else decode(value)
                for (name, decode), value in zip(columns.items(), row, strict=True)
            })
            for row in self.execute(f"SELECT {', '.join(columns)} FROM {TABLES[kind]} {tail}", values)
        ]  # fmt: skip

    def first(self, kind: type[R], tail: str, *values: Any) -> R | None:
        """Return the first of the records that `find` returns, or None."""
        return next(iter(self.find(kind, tail, *values)), None)

    def insert(self, table: str, values: Mapping[str, Any], on_conflict: str = "") -> sqlite3.Cursor:
        """Insert a row."""
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        statement = f"INSERT INTO {table} ({names}) VALUES ({marks}) {on_conflict}"
        return self.execute(statement, tuple(map(_encode, values.values())))

    def put(self, record: object, on_conflict: str = "") -> sqlite3.Cursor:
        """Insert the row of a record."""
        return self.insert(TABLES[type(record)], vars(record), on_conflict)

    def update(self, table: str, changes: Mapping[str, Any], **keys: Any) -> None:
        """Change the rows with these values."""
        assignments = ", ".join(f"{name} = ?" for name in changes)
        condition = " AND ".join(f"{name} = ?" for name in keys)
        values = (*map(_encode, changes.values()), *keys.values())
        self.execute(f"UPDATE {table} SET {assignments} WHERE {condition}", values)

    def close(self) -> None:
        """Close all idle connections; a later transaction opens new ones."""
        while self._idle:
            self._idle.pop().close()


def replace_existing(kind: type[Any], *keys: str) -> str:
    """Return the clause with which an insertion changes the row that has the same keys."""
    changes = ", ".join(f"{name} = excluded.{name}" for name in _columns(TABLES[kind]) if name not in keys)
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}"


_IDENTITY = frozenset({"name", "run", "number", "attempt", "state"})


def check_changes(kind: type[Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `changes` for an update, asserting that each name is a field outside the record's identity."""
    unknown = changes.keys() - (_columns(TABLES[kind]).keys() - _IDENTITY)
    assert not unknown, f"{TABLES[kind]} has no {sorted(unknown)} to change"
    return changes


@functools.cache
def _columns(table: str) -> dict[str, Callable[[Any], Any] | None]:
    """Return the fields of a table's record with their decoders."""
    kind = next(kind for kind, name in TABLES.items() if name == table)
    hints = typing.get_type_hints(kind)
    return {item.name: _decoder(hints[item.name]) for item in fields(kind)}


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that turns a column's value into a field of this type."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        return _decoder(typing.get_args(kind)[0])
    if origin is tuple:
        return lambda text: tuple(json.loads(text))
    if origin is dict:
        return json.loads
    if kind is float:
        return number
    return kind if kind is bool or (isinstance(kind, type) and issubclass(kind, StrEnum)) else None


def _encode(value: Any) -> Any:
    """Return a field as SQLite stores it: tuples and dicts as JSON, and NaN as text, since it would become NULL."""
    if isinstance(value, tuple | list | dict):
        return dump_line(value)
    if isinstance(value, float) and not math.isfinite(value):
        return json.loads(dump_line(value))
    return value


class StoreOperations:
    """Base class of the store's groups of operations."""

    def __init__(self, database: Database) -> None:
        self.database = database


def reads(verb: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run the method on one snapshot of the registry."""

    @functools.wraps(verb)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.read(lambda: verb(self, *args, **kwargs))

    return call


def writes(verb: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run the method in one write transaction, or within the transaction opened by `together`."""

    @functools.wraps(verb)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.write(lambda: verb(self, *args, **kwargs))

    return call


def connect(path: Path, *, readonly: bool = False, busy_seconds: float = _BUSY_SECONDS) -> sqlite3.Connection:
    """Open a connection with explicit transactions, each durable once acknowledged."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:  # a damaged or locked file
        connection.close()
        raise
    return connection
