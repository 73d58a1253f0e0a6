"""SQLite's locks on the registry outlast errors, checks and copies made by the process that holds them."""

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.cluster import doctor
from orchestrator.errors import RegistryError
from orchestrator.registry import backup, migrate, sqlite_errors
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild

Desk = Any

OPEN_AND_CLOSE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM configs").fetchone()[0])
connection.close()
"""


def count_locks(path: Path) -> int:
    """Return how many locks this process has on the file, by the kernel's list."""
    file = f":{path.stat().st_ino}"
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return sum(words[4] == str(os.getpid()) and words[5].endswith(file) for words in lines if words[1] != "->")


def count_descriptors(path: Path) -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(str(path)) for link in links)


def count_configs_elsewhere(path: Path) -> int:
    """Return what another process reads; as the last user of the file it would delete the log when it closes."""
    command = [sys.executable, "-c", OPEN_AND_CLOSE, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("an error")
    error.sqlite_errorcode = code
    return error


def rebuild_refused(path: Path) -> None:
    """A rebuild is refused while a controller lives, after it has looked at the registry."""
    with pytest.raises(RegistryError, match="is alive"):
        rebuild(path, [path.parent / "runs"], now=1.0)


WORK: dict[str, Callable[[Path], object]] = {
    "explain IOERR": lambda path: sqlite_errors.explain(sqlite_error(sqlite3.SQLITE_IOERR), path),
    "explain CANTOPEN": lambda path: sqlite_errors.explain(sqlite_error(sqlite3.SQLITE_CANTOPEN), path),
    "explain PERM": lambda path: sqlite_errors.explain(sqlite_error(sqlite3.SQLITE_PERM), path),
    "explain READONLY": lambda path: sqlite_errors.explain(sqlite_error(sqlite3.SQLITE_READONLY), path),
    "second store": lambda path: Store.open(path).close(),
    "read-only store": lambda path: Store.open(path, readonly=True).close(),
    "upgrade": migrate.upgrade,
    "backup": lambda path: backup.backup(path, path.with_name("copy")),
    "doctor": lambda path: list(doctor.registry(path)),
    "rebuild": rebuild_refused,
}


@pytest.mark.parametrize("work", WORK)
def test_the_lock_of_an_open_registry_is_kept(desk: Desk, work: str) -> None:
    desk.run()
    before, log = count_locks(desk.path), desk.path.with_name("registry.db-wal").stat().st_ino
    assert before > 0
    WORK[work](desk.path)
    assert count_locks(desk.path) == before
    count_configs_elsewhere(desk.path)
    assert desk.path.with_name("registry.db-wal").stat().st_ino == log
    desk.store.put_config({"name": "later"})
    assert count_configs_elsewhere(desk.path) == 2


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """Let every write beyond 1000 bytes fail, which SQLite reports as an I/O error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_io_error_closes_every_connection_and_the_next_write_opens_new_ones(desk: Desk) -> None:
    desk.run()
    assert count_locks(desk.path) > 0
    with no_file_may_grow(), pytest.raises(RegistryError, match="I/O error"):
        desk.store.put_config({"name": "lost"})
    assert count_descriptors(desk.path) == 0
    assert count_configs_elsewhere(desk.path) == 1
    desk.store.put_config({"name": "later"})
    assert count_locks(desk.path) > 0
    assert count_configs_elsewhere(desk.path) == 2
    desk.store.close()
    raw = sqlite3.connect(desk.path)
    assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()
