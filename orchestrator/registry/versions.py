"""Versions of the registry's tables, and refusal of unknown ones."""

import sqlite3
from contextlib import closing
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry import sqlite_errors

OLDEST, HEAD = "0009", "0012"
"""Oldest version that can be upgraded, and the version that this program reads."""


def connect_readonly(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
    connection.row_factory = sqlite3.Row
    return connection


def read_version(path: Path) -> str | None:
    """Return the version of the registry's tables, "" if it is lost; None for a missing or empty file.

    Raises RegistryError.
    """
    if not path.exists():
        return None
    try:
        with closing(connect_readonly(path)) as connection:
            return find_version(connection, path)
    except sqlite3.Error as error:
        raise sqlite_errors.explain(error, path) from error


def find_version(connection: sqlite3.Connection, path: Path) -> str | None:
    """Return the version in an open file, as `read_version` does."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"alembic_version", "configs"} <= tables:
        raise sqlite_errors.foreign(path)
    if not tables:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return "" if row is None else str(row[0])


def require_known(version: str | None, path: Path) -> None:
    """Raise RegistryError for a registry that this program can neither read nor upgrade; None means an empty one."""
    if version is None or OLDEST <= version <= HEAD:
        return
    if version < OLDEST:
        what = f"has version {version or '?'}, which this orch can neither read nor upgrade (it needs {HEAD})"
        hint = "`orch db rebuild --root FOLDER-OF-RUNS` sets it aside and makes a new one from the run directories"
    else:
        what = f"has version {version}, which is newer than this orch knows (up to {HEAD})"
        hint = "upgrade orch (pip install -U orch), or set ORCH_REGISTRY to another file"
    raise RegistryError(f"the registry {what}", where=str(path), hint=hint)
