"""Migration of a registry to the newest version; alembic is imported only if there is one to run."""

import random
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.registry import backup, fast_queries, sqlite_errors, versions
from orchestrator.registry.database import connect

if TYPE_CHECKING:
    import sqlalchemy

FOLDER = Path(__file__).parent / "migrations"
_PATIENCE = 30.0


def set_journal(path: Path, mode: str) -> None:
    """Set the journal mode of the file; does nothing if the mode is already right."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            connection = connect(path)
            try:
                connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()
                return
            finally:
                connection.close()
        except sqlite3.Error as error:
            # Changing the mode needs exclusive access and does not wait for it, whatever the timeout.
            if not sqlite_errors.is_busy(error) or time.monotonic() > give_up:
                raise sqlite_errors.explain(error, path) from error
            time.sleep(random.uniform(0.01, 0.1))


def upgrade(path: Path) -> None:
    """Run all missing migrations in one transaction, after a backup. Raises RegistryError.

    If two processes arrive here, the second one waits for the lock and then finds the work done.
    """
    import sqlalchemy  # heavy like alembic, and needed only here
    from alembic import command
    from alembic.config import Config

    before = fast_queries.version(path)
    if before is not None:
        backup.backup(path, path.with_name(f"{path.name}.{before}.bak"))
    # Migrations rebuild tables, which needs foreign keys off; this switch does nothing inside a transaction.
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: _without_keys(path), poolclass=sqlalchemy.NullPool)
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    try:
        with engine.begin() as connection:
            _refuse_foreign_tables(connection, path)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
            assert broken is None, f"the migration to {versions.HEAD} broke a reference: {broken}"
    except sqlalchemy.exc.DBAPIError as error:
        raise sqlite_errors.explain(error.orig, path) from error
    finally:
        engine.dispose()


def _without_keys(path: Path) -> sqlite3.Connection:
    connection = connect(path, busy_seconds=_PATIENCE)
    try:
        connection.execute("PRAGMA foreign_keys = OFF")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _refuse_foreign_tables(connection: "sqlalchemy.Connection", path: Path) -> None:
    tables = {row[0] for row in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return
    if "alembic_version" not in tables or "configs" not in tables:
        raise sqlite_errors.foreign(path)
    version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    versions.require_known(str(version or ""), path)
