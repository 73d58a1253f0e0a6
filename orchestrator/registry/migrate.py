"""Tables of the registry, and their migration to the newest version."""

import os
import random
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry import backup, sqlite_errors, versions
from orchestrator.registry.database import connect
from orchestrator.registry.tables import create_statements

_PATIENCE = 30.0
_CREATION = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
    *create_statements(),
    *(
        f"CREATE TRIGGER configs_never_{change} BEFORE {change} ON configs "
        f"BEGIN SELECT RAISE(ABORT, 'a config is never {past}: runs point at it'); END"
        for change, past in (("UPDATE", "changed"), ("DELETE", "deleted"))
    ),
    # REPLACE deletes without firing delete triggers, so a second row with the same digest must be refused too.
    """CREATE TRIGGER configs_never_replaced BEFORE INSERT ON configs
    WHEN EXISTS (SELECT 1 FROM configs WHERE digest = NEW.digest AND data IS NOT NEW.data)
    BEGIN SELECT RAISE(ABORT, 'a config is never changed: runs point at it'); END""",
)
MIGRATIONS: Mapping[str, tuple[str, ...]] = {
    "0010": (
        "ALTER TABLE attempts ADD COLUMN sluid TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE attempts ADD COLUMN restarts INTEGER DEFAULT 0 NOT NULL",
    ),
    "0011": (
        "ALTER TABLE runs ADD COLUMN predecessor TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE runs ADD COLUMN sweep TEXT DEFAULT '{}' NOT NULL",
        "ALTER TABLE attempts ADD COLUMN expected_start FLOAT",
        "ALTER TABLE attempts ADD COLUMN expected_at FLOAT",
    ),
    "0012": ("ALTER TABLE runs ADD COLUMN predecessor_created_at FLOAT DEFAULT 0.0 NOT NULL",),
}
"""Statements that upgrade a registry to each version after the first release, oldest first."""


def set_journal(path: Path, mode: str) -> None:
    """Set the journal mode of the file, unless it already has that mode."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            with closing(connect(path)) as connection:
                connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()
            return
        except sqlite3.Error as error:
            # Changing the mode needs exclusive access, and SQLite does not wait for it, whatever the timeout.
            if not sqlite_errors.is_busy(error) or time.monotonic() > give_up:
                raise sqlite_errors.explain(error, path) from error
            time.sleep(random.uniform(0.01, 0.1))


def upgrade(path: Path) -> None:
    """Run all missing migrations in one transaction, after a backup. Raises RegistryError.

    If two processes upgrade at the same time, the second one waits for the lock and then has nothing to do.
    """
    before = versions.read_version(path)
    if before is not None:
        backup.backup(path, path.with_name(f"{path.name}.{before}.bak"))
    try:
        with closing(connect(path, busy_seconds=_PATIENCE)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            present = versions.find_version(connection, path)
            versions.require_known(present, path)
            run_migrations(connection, present)
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise sqlite_errors.explain(error, path) from error


def upgrade_to_read(path: Path, version: str) -> None:
    """Upgrade a registry of this version, if it is older, for a command that only reads.

    Raises RegistryError if it is unknown, or older and read-only.
    """
    versions.require_known(version, path)
    if version == versions.HEAD:
        return
    has_place = os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True)  # for the backup
    if not (has_place and os.access(path, os.R_OK | os.W_OK, effective_ids=True)):
        what = f"the registry has the older version {version}, this orch reads {versions.HEAD}, and it is read-only"
        hint = "its owner upgrades it with any command of this orch (`orch status`), after a backup"
        raise RegistryError(what, where=str(path), hint=hint)
    upgrade(path)


def run_migrations(connection: sqlite3.Connection, present: str | None) -> None:
    """Execute the statements of all versions after `present`; if it is None, create the tables in the empty file."""
    upgrades = (one for version, statements in MIGRATIONS.items() if version > (present or "") for one in statements)
    for statement in _CREATION if present is None else upgrades:
        connection.execute(statement)
    connection.execute("DELETE FROM alembic_version")
    connection.execute("INSERT INTO alembic_version VALUES (?)", (versions.HEAD,))
