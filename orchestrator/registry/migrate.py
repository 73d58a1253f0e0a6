"""Tables of the registry, and their migration to the newest version."""

import random
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from orchestrator.registry import backup, sqlite_errors, versions
from orchestrator.registry.database import connect

_PATIENCE = 30.0
_IMMUTABLE = """
CREATE TRIGGER configs_never_{change} BEFORE {change} ON configs
BEGIN SELECT RAISE(ABORT, 'a config is never {past}: runs point at it'); END
"""
# REPLACE deletes without firing delete triggers, so a second row with the same digest must be refused too.
_NOT_REPLACED = """
CREATE TRIGGER configs_never_replaced BEFORE INSERT ON configs
WHEN EXISTS (SELECT 1 FROM configs WHERE digest = NEW.digest AND data IS NOT NEW.data)
BEGIN SELECT RAISE(ABORT, 'a config is never changed: runs point at it'); END
"""

MIGRATIONS: Mapping[str, tuple[str, ...]] = {
    "0009": (
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL,"
        " CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))",
        "CREATE TABLE configs (digest TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (digest))",
        _IMMUTABLE.format(change="UPDATE", past="changed"),
        _IMMUTABLE.format(change="DELETE", past="deleted"),
        _NOT_REPLACED,
        """CREATE TABLE runs (
            id INTEGER NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, cluster TEXT NOT NULL,
            run_dir TEXT NOT NULL, config_digest TEXT NOT NULL, total_steps INTEGER NOT NULL, step INTEGER NOT NULL,
            loss FLOAT, not_before FLOAT NOT NULL, fresh_from INTEGER NOT NULL, created_at FLOAT NOT NULL,
            updated_at FLOAT NOT NULL, identity TEXT NOT NULL, scheduler TEXT DEFAULT '' NOT NULL,
            tags TEXT DEFAULT '[]' NOT NULL, notified TEXT DEFAULT '{}' NOT NULL, removal TEXT DEFAULT '' NOT NULL,
            PRIMARY KEY (id), UNIQUE (name),
            CONSTRAINT fk_runs_config_digest FOREIGN KEY(config_digest) REFERENCES configs (digest))""",
        "CREATE INDEX ix_runs_state ON runs (state, id)",
        """CREATE TABLE attempts (
            run TEXT NOT NULL, number INTEGER NOT NULL, state TEXT NOT NULL, nonce TEXT NOT NULL,
            job_name TEXT NOT NULL, reason TEXT NOT NULL, epoch INTEGER NOT NULL, job_id TEXT, submit_time TEXT,
            job_state TEXT, nodes TEXT NOT NULL, excluded TEXT NOT NULL, intent_at FLOAT NOT NULL, submitted_at FLOAT,
            started_at FLOAT, ended_at FLOAT, resumed_from INTEGER, first_step INTEGER, last_step INTEGER,
            saved_step INTEGER, generations INTEGER NOT NULL, failure TEXT, decision TEXT,
            scheduler TEXT DEFAULT '' NOT NULL, config_digest TEXT DEFAULT '' NOT NULL, smaller_world TEXT,
            PRIMARY KEY (run, number), UNIQUE (job_name),
            CONSTRAINT fk_attempts_run FOREIGN KEY(run) REFERENCES runs (name))""",
        """CREATE TABLE submissions (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL, submitted_at FLOAT NOT NULL,
            job_id TEXT, outcome TEXT NOT NULL,
            PRIMARY KEY (run, attempt, number),
            CONSTRAINT fk_submissions_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number))""",
        "CREATE INDEX ix_submissions_submitted_at ON submissions (submitted_at)",
        """CREATE TABLE generations (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL, started_at FLOAT NOT NULL,
            ended_at FLOAT, resumed_from INTEGER, last_step INTEGER, reason TEXT NOT NULL, failure TEXT,
            tier TEXT DEFAULT '' NOT NULL,
            PRIMARY KEY (run, attempt, number),
            CONSTRAINT fk_generations_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number))""",
        """CREATE TABLE checkpoints (
            run TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
            trust TEXT NOT NULL, bytes INTEGER NOT NULL, path TEXT NOT NULL, committed_at FLOAT NOT NULL,
            reason TEXT NOT NULL, tier TEXT DEFAULT '' NOT NULL, seconds FLOAT, stall FLOAT,
            manifest TEXT DEFAULT '' NOT NULL,
            PRIMARY KEY (run, name),
            CONSTRAINT fk_checkpoints_run FOREIGN KEY(run) REFERENCES runs (name))""",
        "CREATE INDEX ix_checkpoints_step ON checkpoints (run, step)",
        """CREATE TABLE copies (
            run TEXT NOT NULL, name TEXT NOT NULL, tier TEXT NOT NULL, path TEXT NOT NULL, bytes INTEGER NOT NULL,
            copied_at FLOAT NOT NULL,
            PRIMARY KEY (run, name, tier),
            CONSTRAINT fk_copies_checkpoint FOREIGN KEY(run, name) REFERENCES checkpoints (run, name))""",
        """CREATE TABLE transitions (
            id INTEGER NOT NULL, run TEXT NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, before TEXT NOT NULL,
            after TEXT NOT NULL, reason TEXT NOT NULL, time FLOAT NOT NULL,
            PRIMARY KEY (id), CONSTRAINT fk_transitions_run FOREIGN KEY(run) REFERENCES runs (name))""",
        "CREATE INDEX ix_transitions_run ON transitions (run, id)",
        """CREATE TABLE notices (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, source TEXT NOT NULL, seq INTEGER NOT NULL,
            kind TEXT NOT NULL, generation INTEGER NOT NULL, time FLOAT NOT NULL, node TEXT NOT NULL,
            data TEXT NOT NULL,
            PRIMARY KEY (run, attempt, source, seq),
            CONSTRAINT fk_notices_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number))""",
        "CREATE INDEX ix_notices_kind ON notices (kind, time)",
        """CREATE TABLE nodes (
            cluster TEXT NOT NULL, name TEXT NOT NULL, first_seen FLOAT NOT NULL, last_seen FLOAT NOT NULL,
            attempts INTEGER NOT NULL, failures INTEGER NOT NULL, excluded_until FLOAT NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (cluster, name))""",
        """CREATE TABLE lease (
            id INTEGER NOT NULL, epoch INTEGER NOT NULL, holder TEXT NOT NULL, renewed_at FLOAT NOT NULL,
            expires_at FLOAT NOT NULL, ticked_at FLOAT NOT NULL, scheduler TEXT DEFAULT '' NOT NULL,
            PRIMARY KEY (id))""",
        "CREATE UNIQUE INDEX ix_lease_scheduler ON lease (scheduler)",
        """CREATE TABLE asks (
            id INTEGER NOT NULL, run TEXT NOT NULL, verb TEXT NOT NULL, args TEXT NOT NULL, asked_at FLOAT NOT NULL,
            answered_at FLOAT, answer TEXT NOT NULL,
            PRIMARY KEY (id), CONSTRAINT fk_asks_run FOREIGN KEY(run) REFERENCES runs (name))""",
        "CREATE INDEX ix_asks_answered_at ON asks (answered_at)",
        """CREATE TABLE cursors (
            run TEXT NOT NULL, file TEXT NOT NULL, "offset" INTEGER NOT NULL,
            PRIMARY KEY (run, file), CONSTRAINT fk_cursors_run FOREIGN KEY(run) REFERENCES runs (name))""",
        """CREATE TABLE restore_tests (
            test TEXT NOT NULL, run TEXT NOT NULL, checkpoint TEXT NOT NULL, layout TEXT NOT NULL,
            step INTEGER NOT NULL, begun_at FLOAT NOT NULL, ended_at FLOAT, verdict TEXT NOT NULL,
            reason TEXT NOT NULL, evidence TEXT NOT NULL, forced INTEGER NOT NULL,
            PRIMARY KEY (test), CONSTRAINT fk_restore_tests_test FOREIGN KEY(test) REFERENCES runs (name))""",
        "CREATE INDEX ix_restore_tests_run ON restore_tests (run, begun_at)",
        "CREATE INDEX ix_restore_tests_ended_at ON restore_tests (ended_at)",
    ),
}
"""Statements by version, oldest first."""


def set_journal(path: Path, mode: str) -> None:
    """Set the journal mode of the file; does nothing if the mode is already right."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            with closing(connect(path)) as connection:
                connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()
            return
        except sqlite3.Error as error:
            # Changing the mode needs exclusive access and does not wait for it, whatever the timeout.
            if not sqlite_errors.is_busy(error) or time.monotonic() > give_up:
                raise sqlite_errors.explain(error, path) from error
            time.sleep(random.uniform(0.01, 0.1))


def upgrade(path: Path) -> None:
    """Run all missing migrations in one transaction, after a backup. Raises RegistryError.

    If two processes arrive here, the second one waits for the lock and then finds the work done.
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


def run_migrations(connection: sqlite3.Connection, present: str | None) -> None:
    """Execute the statements of all versions after the present one; None means an empty file."""
    for version, statements in MIGRATIONS.items():
        if version > (present or ""):
            for statement in statements:
                connection.execute(statement)
    connection.execute("DELETE FROM alembic_version")
    connection.execute("INSERT INTO alembic_version VALUES (?)", (versions.HEAD,))
