"""New registries of tests are copies of one that the migrations made: to run them takes longer than most tests.

For the same reason all registries of a process share the statements that one of them has compiled.
"""

import contextlib
import functools
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import sqlalchemy

from orchestrator.registry import database, migrate

_upgrade, _FOLDER = migrate.upgrade, migrate.FOLDER
_make_engine = database._engine


@functools.cache
def _made() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        path.touch()
        _upgrade(path)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return connection.serialize()


def _copy_or_upgrade(path: Path) -> None:
    """Fill an empty registry; upgrade one that has tables, or with a test's own migrations."""
    with contextlib.closing(sqlite3.connect(path)) as target:
        is_new = migrate.FOLDER is _FOLDER and not target.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if is_new:
            with contextlib.closing(sqlite3.connect(":memory:")) as source:
                source.deserialize(_made())
                source.backup(target)
    if not is_new:
        _upgrade(path)


@functools.cache
def _first() -> sqlalchemy.Engine:
    """An engine that has learned what its SQLite can do."""
    engine = _make_engine(lambda: sqlite3.connect(":memory:", isolation_level=None))
    engine.connect().close()
    engine.dispose()
    return engine


def _with_shared_statements(creator: Callable[[], sqlite3.Connection]) -> sqlalchemy.Engine:
    """An engine that looks up a statement where others have compiled it: the key has the dialect in it."""
    engine = _make_engine(creator)
    engine.dialect, engine._compiled_cache = _first().dialect, _first()._compiled_cache
    return engine


def copy_new_registries() -> None:
    """Have every empty registry of this process filled by a copy, and statements compiled once."""
    migrate.upgrade, database._engine = _copy_or_upgrade, _with_shared_statements
