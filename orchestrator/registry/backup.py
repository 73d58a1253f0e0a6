"""A copy of the registry that is whole, taken while others write."""

import contextlib
import os
import secrets
import sqlite3
from pathlib import Path

from checkpointing.storage.durable import fsync_dir
from orchestrator.errors import Precondition, RegistryError
from orchestrator.registry import sqlite_errors


def backup(path: Path, to: Path) -> Path:
    """Copy the registry to the file `to` and check the copy; raises RegistryError or Precondition.

    `to` is then as it was. An older backup is replaced, and an empty file; nothing else is.
    """
    if not path.exists():
        raise RegistryError("there is no registry to back up", where=str(path), hint="`orch submit` makes one")
    if to.exists() and to.samefile(path):
        raise RegistryError("a registry cannot be its own backup", where=str(to), hint="name another file")
    to = to.resolve()  # a link stays one: what it points to is replaced
    if to.exists() and not _replaceable(to):
        raise Precondition(
            "something else than a backup of a registry is there, and it is left as it was", where=str(to),
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
        what = f"the backup cannot be written: {error.strerror}"
        raise RegistryError(what, where=str(to), hint="orch db backup FILE") from error
    except sqlite3.Error as error:
        raise sqlite_errors.explain(error, path) from error
    finally:
        for left in (temporary, temporary.with_name(temporary.name + "-journal")):
            left.unlink(missing_ok=True)
    return to


def _replaceable(to: Path) -> bool:
    """Whether this is an empty file or a registry; never a device, a pipe, or somebody's own file."""
    if not to.is_file():
        return False
    if not to.stat().st_size:
        return True
    with contextlib.closing(sqlite3.connect(f"{to.as_uri()}?mode=ro", uri=True, timeout=30)) as found:
        try:
            names = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError:  # no database at all
            return False
    return {"runs", "attempts", "alembic_version"} <= names


def _copy(path: Path, to: Path) -> None:
    source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)
    target = sqlite3.connect(to)
    try:
        source.backup(target)
        # The copy stands alone: a write-ahead log beside it would be forgotten by whoever moves the file.
        target.execute("PRAGMA journal_mode = DELETE")
        verdict = target.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            hint = "`orch db rebuild --root FOLDER-OF-RUNS` makes a new one from the run directories"
            raise RegistryError(f"the copy is damaged: {verdict}", where=str(path), hint=hint)
    finally:
        target.close()
        source.close()
