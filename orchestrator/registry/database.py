"""Registry file: connections, transactions, rows as records, and translation of errors.

SQLAlchemy builds the statements, but sqlite3 executes them, because SQLAlchemy's overhead exceeds SQLite's own time.
"""

import functools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import ClauseElement, ColumnElement

from orchestrator.registry.sqlite_errors import explain, is_busy, is_io_error
from orchestrator.registry.tables import (
    alteration,
    compile_statement,
    deletion,
    encode,
    field_names,
    insertion,
    make_record,
    selection,
)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound="StoreOperations")

NO_VALUES: Mapping[str, Any] = MappingProxyType({})
_BUSY_SECONDS = 5.0
"""SQLite's timeout for a lock, in seconds per statement."""
_WRITE = "BEGIN IMMEDIATE"
"""Start of a write. A deferred BEGIN that turns into a write fails immediately if another writer came first."""


class Database:
    """Runs transactions. Reads see one snapshot, writes lock the file first, and busy transactions are retried."""

    def __init__(
        self, path: Path, *, readonly: bool = False, patience: float = 30.0, busy_seconds: float = _BUSY_SECONDS
    ) -> None:
        self.path, self._patience = path, patience
        self.after_commit: Callable[[set[str]], None] = lambda runs: None
        self.connect = functools.partial(connect, path, readonly=readonly, busy_seconds=busy_seconds)
        self._idle: list[sqlite3.Connection] = []
        self._active = threading.local()

    def read(self, work: Callable[[], T]) -> T:
        """Run `work`, including the reads it calls, on one snapshot."""
        return self._run(work, begin="BEGIN")

    def write(self, work: Callable[[], T]) -> T:
        """Run `work` in one BEGIN IMMEDIATE transaction, and repeat it if the registry is busy."""
        return self._run(work, begin=_WRITE)

    def _run(self, work: Callable[[], T], *, begin: str) -> T:
        """Run `work` in a transaction; without `begin`, its single statement is the transaction."""
        if self._connection is not None:
            assert self._active.writes or begin != _WRITE, "a write within a read: its lock would come too late"
            return work()
        give_up = time.monotonic() + self._patience
        while True:
            try:
                result, touched = self._once(work, begin)
            except sqlite3.IntegrityError:
                raise
            except sqlite3.Error as error:
                if is_io_error(error):
                    self.close()  # the next transaction opens a new connection
                if not is_busy(error) or time.monotonic() > give_up:
                    raise explain(error, self.path) from error
                time.sleep(random.uniform(0.01, 0.1))
            else:
                if touched:
                    self.after_commit(touched)
                return result

    def _once(self, work: Callable[[], T], begin: str) -> tuple[T, set[str]]:
        """Return the result, and the names of changed runs."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            if begin:
                connection.execute(begin)
            self._active.connection, self._active.writes, self._active.touched = connection, begin == _WRITE, set[str]()
            result = work()
            if begin:
                connection.execute("COMMIT")
            return result, self._active.touched
        finally:
            self._active.connection = None
            with suppress(sqlite3.Error):
                connection.rollback()  # does nothing after a commit
            self._idle.append(connection)

    @property
    def _connection(self) -> sqlite3.Connection | None:
        """Connection of this thread's transaction."""
        return getattr(self._active, "connection", None)

    def touch(self, run: str) -> None:
        """Note that the run's record file must be updated after the commit."""
        self._active.touched.add(run)

    def execute(self, statement: ClauseElement, values: Mapping[str, Any] = NO_VALUES) -> sqlite3.Cursor:
        """Execute a statement within the transaction of this thread."""
        assert self._connection is not None
        sql, constants = compile_statement(statement, tuple(values))
        return self._connection.execute(sql, constants | {name: encode(value) for name, value in values.items()})

    def rows(self, query: ClauseElement, values: Mapping[str, Any] = NO_VALUES) -> list[Any]:
        """Return the rows that a query reads, within the transaction of this thread if it has one."""
        return self._run(lambda: self.execute(query, values).fetchall(), begin="")

    def find(
        self, kind: type[R], *where: ColumnElement[bool], values: Mapping[str, Any] = NO_VALUES,
        limit: int | None = None, **keys: Any,
    ) -> list[R]:  # fmt: skip
        """Return the records of the rows that have these keys and meet the conditions, in the table's order.

        The statement is cached, so the conditions must be constants; `values` are their parameters.
        """
        parameters = {**values, **keys, "limit": -1 if limit is None else limit}
        return [make_record(kind, row) for row in self.rows(selection(kind, where, *keys), parameters)]

    def first(self, kind: type[R], **keys: Any) -> R | None:
        """Return the first record that `find` returns, or None."""
        return next(iter(self.find(kind, **keys)), None)

    def put(self, record: object, *, keep_existing: bool = False) -> sqlite3.Cursor:
        """Insert the row of a record."""
        return self.execute(insertion(type(record), keep_existing=keep_existing), vars(record))

    def update(self, kind: type[Any], changes: Mapping[str, Any], **keys: Any) -> None:
        """Change the rows with these keys."""
        self.execute(alteration(kind, *keys), {**changes, **{f"of_{key}": value for key, value in keys.items()}})

    def delete(self, kind: type[Any], **keys: Any) -> None:
        """Delete the rows with these keys."""
        self.execute(deletion(kind, *keys), keys)

    def close(self) -> None:
        """Close all idle connections; a later transaction opens new ones."""
        while self._idle:
            self._idle.pop().close()


_IDENTITY = frozenset({"name", "run", "number", "attempt", "state"})


def check_changes(kind: type[Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `changes`, asserting that each name is a field that an update may change."""
    unknown = changes.keys() - ({*field_names(kind)} - _IDENTITY)
    assert not unknown, f"{kind.__name__} has no {sorted(unknown)} to change"
    return changes


class StoreOperations:
    """Base class of the store's groups of operations."""

    def __init__(self, database: Database) -> None:
        self.database = database


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
