"""Consistent backup of the registry while other processes write."""

import contextlib
import os
import secrets
import shlex
import sqlite3
from pathlib import Path

from checkpointing.storage.durable import fsync_dir
from orchestrator.errors import Precondition, RegistryError
from orchestrator.registry import sqlite_errors


def backup(path: Path, to: Path) -> Path:
    """Copy the registry to the file `to` and check the copy. Raises RegistryError or Precondition.

    If that fails, `to` is unchanged. Only an older backup or an empty file is replaced.
    """
    if not path.exists():
        raise RegistryError("there is no registry to back up", where=str(path), hint="`orch submit` creates one")
    if to.exists() and to.samefile(path):
        raise RegistryError("a registry cannot be its own backup", where=str(to), hint="name another file")
    to = to.resolve()  # a link stays, and its target is replaced
    if to.exists() and not _replaceable(to):
        raise Precondition(
            "the file is not a registry backup and was not replaced", where=str(to),
            hint="name another file, or remove this one first",
        )  # fmt: skip
    temporary = to.with_name(f".{to.name}.{secrets.token_hex(6)}.tmp")
    try:
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        _copy(path, temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(temporary, to)
        fsync_dir(to.parent)
    except OSError as error:
        raise _unwritten(error, to) from error
    except sqlite3.Error as error:
        raise sqlite_errors.explain(error, path) from error
    finally:
        for ending in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(OSError):  # its parent is not a folder
                temporary.with_name(temporary.name + ending).unlink(missing_ok=True)
    return to


def _unwritten(error: OSError, to: Path) -> Precondition:
    folder = shlex.quote(str(to.parent))
    hint = "name a file in your own folder: orch db backup ~/registry-backup.db"
    if not to.parent.exists():
        hint = f"mkdir -p {folder}, or name a file in an existing folder"
    return Precondition(f"the backup cannot be written: {error.strerror or error}", where=str(to), hint=hint)


def _replaceable(to: Path) -> bool:
    """Return whether this is an empty file or a registry; other files, devices and pipes are kept."""
    if not to.is_file():
        return False
    if not to.stat().st_size:
        return True
    with contextlib.closing(sqlite3.connect(f"{to.as_uri()}?mode=ro", uri=True, timeout=30)) as found:
        try:
            names = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError:  # not a database
            return False
    return {"runs", "attempts", "alembic_version"} <= names


def _copy(path: Path, to: Path) -> None:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as source, _open_database(to) as target:
        source.backup(target)
    with _open_database(to) as target:
        # A write-ahead log next to the copy could be left behind when the copy is moved.
        target.execute("PRAGMA journal_mode = DELETE")
        verdict = target.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            hint = "`orch db rebuild --root FOLDER-OF-RUNS` makes a new one from the run directories"
            raise RegistryError(f"the copy is damaged: {verdict}", where=str(path), hint=hint)


def _open_database(path: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(path))
