"""Writes to a registry whose SQLite has no locks at all, as on a file system whose locks end at the host.

`link_lock_program.py REGISTRY ROUNDS linked|bare`
"""

import sqlite3
import sys
from pathlib import Path

from orchestrator.registry.locks.link_lock import LinkLock


def write(path: Path, rounds: int, lock: LinkLock | None) -> None:
    for _ in range(rounds):
        if lock is None:
            add_one(path)
        else:
            with lock.hold() as check:
                add_one(path)
                check()


def add_one(path: Path) -> None:
    connection = sqlite3.connect(f"{path.as_uri()}?vfs=unix-none", uri=True, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN IMMEDIATE")
    (value,) = connection.execute("SELECT value FROM counter").fetchone()
    connection.execute("UPDATE counter SET value = ?", (value + 1,))
    connection.execute("COMMIT")
    connection.close()


if __name__ == "__main__":
    registry = Path(sys.argv[1])
    sys.stdin.readline()
    write(registry, int(sys.argv[2]), LinkLock(registry) if sys.argv[3] == "linked" else None)
