"""Registry file: connection settings, transactions, and translation of errors."""

import functools
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from orchestrator.registry.rows import TOUCHED
from orchestrator.registry.sqlite_errors import explain, is_busy, is_io_error

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="StoreOperations")

_BUSY_SECONDS = 5.0
"""SQLite's own timeout for a lock, per statement."""
_WRITES = "orch_writes"


class Database:
    """Transaction runner: reads see one snapshot, writes take the lock at once, and busy ones are retried."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        patience: float = 30.0,
        busy_seconds: float = _BUSY_SECONDS,
    ) -> None:
        self.path, self._patience = path, patience
        self.after_commit: Callable[[set[str]], None] = lambda runs: None
        self._engine = _engine(lambda: connect(path, readonly=readonly, busy_seconds=busy_seconds))
        self._active = threading.local()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, including the reads it calls, on one snapshot."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one BEGIN IMMEDIATE transaction; all of it is repeated if the registry is busy."""
        return self._run(work, writes=True)

    def _run(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        outer: Connection | None = getattr(self._active, "connection", None)
        if outer is not None:
            assert self._active.writes or not writes, "a write within a read: its lock would come too late"
            return work(outer)
        give_up = time.monotonic() + self._patience
        while True:
            try:
                result, touched = self._once(work, writes=writes)
            except IntegrityError:
                raise
            except DBAPIError as error:
                if is_io_error(error.orig):
                    self.close()  # the next transaction connects anew
                if not is_busy(error.orig) or time.monotonic() > give_up:
                    raise explain(error.orig, self.path) from error
                time.sleep(random.uniform(0.01, 0.1))
            else:
                if touched:
                    self.after_commit(touched)
                return result

    def _once(self, work: Callable[[Connection], T], *, writes: bool) -> tuple[T, set[str]]:
        """Return the result and the runs that changed."""
        with self._engine.connect().execution_options(**{_WRITES: writes}) as connection:
            connection.info.pop(TOUCHED, None)
            with connection.begin():
                self._active.connection, self._active.writes = connection, writes
                try:
                    result = work(connection)
                finally:
                    self._active.connection = None
            touched: set[str] = connection.info.pop(TOUCHED, set())
        return result, touched

    def close(self) -> None:
        """Close all connections; a later transaction opens new ones."""
        self._engine.dispose()


class StoreOperations:
    """Base class of the store's groups of operations."""

    def __init__(self, database: Database) -> None:
        self.database = database


def reads(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run the method on one snapshot of the registry."""

    @functools.wraps(verb)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.read(lambda connection: verb(self, connection, *args, **kwargs))

    return call


def writes(verb: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run the method in one write transaction, or within the transaction opened by `together`."""

    @functools.wraps(verb)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.write(lambda connection: verb(self, connection, *args, **kwargs))

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


def _engine(creator: Callable[[], sqlite3.Connection]) -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine("sqlite://", creator=creator, poolclass=sqlalchemy.QueuePool, pool_size=2)
    # A deferred BEGIN that turns into a write fails at once if another writer came first, whatever the timeout.
    sqlalchemy.event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    options: dict[str, Any] = dict(connection.get_execution_options())
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")
