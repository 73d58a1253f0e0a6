"""New registries of tests are copies of one that the migrations made: to run them takes longer than most tests."""

import contextlib
import functools
import sqlite3
import tempfile
from pathlib import Path

from orchestrator.registry import migrate

_upgrade, _FOLDER = migrate.upgrade, migrate.FOLDER


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


def copy_new_registries() -> None:
    """Have every empty registry of this process filled by a copy."""
    migrate.upgrade = _copy_or_upgrade
