"""Messages for SQLite's errors, and detection of errors worth a retry.

WARNING: a process that may have the registry open must not open the file in any other way. Closing any descriptor of a
file drops all POSIX locks of the process on it, including SQLite's (sqlite.org/howtocorrupt.html, 2.2).
"""

import os
import shlex
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from orchestrator.errors import RegistryError

ELSEWHERE = "ORCH_REGISTRY=/path/on/a/local/disk/registry.db"
BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
"""Result codes worth a retry; network file systems return PROTOCOL if a lock was lost in transit."""

_MOUNT, _FOLDER = "on a read-only mount", "in a folder without write permission"
_MAKE_WRITABLE = {_MOUNT: "ask on the host that writes it", _FOLDER: "chmod u+w {folder}"}
_COPY = "`cp {path}* FOLDER`, then `export ORCH_REGISTRY=FOLDER/{path.name}`"
_UNWRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_UNOPENED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR)
_MEANINGS = {
    sqlite3.SQLITE_READONLY: ("cannot be written: file, folder or mount is read-only", f"set {ELSEWHERE}"),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check that the folder exists and belongs to you"),
    sqlite3.SQLITE_PERM: ("cannot be opened: permission denied", "check who owns the file"),
    sqlite3.SQLITE_FULL: ("cannot grow: the disk is full", "free some space; what was acknowledged is safe"),
    sqlite3.SQLITE_IOERR: ("cannot be read or written: I/O error", f"check the disk, or set {ELSEWHERE}"),
    sqlite3.SQLITE_CORRUPT: ("is damaged", "move it away, then: orch db rebuild --root FOLDER-OF-RUNS"),
    sqlite3.SQLITE_NOTADB: ("is not a registry", f"set {ELSEWHERE}, or move the file away"),
}


class ForeignDatabase(RegistryError):
    """Refusal of a database that belongs to another program."""


def code(error: BaseException | None) -> int:
    """Return SQLite's primary result code, or 0."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_io_error(error: BaseException | None) -> bool:
    """Return whether a read or write of the file failed, so that the state of its connections is unknown."""
    return code(error) == sqlite3.SQLITE_IOERR


def is_busy(error: BaseException | None) -> bool:
    """Return whether the same transaction may succeed a moment later."""
    return code(error) in BUSY


def explain(error: BaseException | None, path: Path) -> RegistryError:
    """Return the RegistryError that reports a SQLite error."""
    if is_busy(error):
        hint = "another orch process is writing; try again (`orch controller status` shows who)"
        return RegistryError("the registry is locked by another process", where=str(path), hint=hint)
    if code(error) in _UNOPENED and (plain := _access_error(path)) is not None:
        return plain
    if code(error) in _UNWRITABLE and (place := log_without_place(path)):
        what = f"the registry is {place}, where its write-ahead log cannot be used"
        hint = f"{_MAKE_WRITABLE[place].format(folder=path.parent)}; or copy it: {_COPY.format(path=path)}"
        return RegistryError(what, where=str(path), hint=hint)
    if code(error) == sqlite3.SQLITE_READONLY and not _is_writable(path):
        hint = f"chmod u+w {shlex.quote(str(path))}, or set {ELSEWHERE}"
        return RegistryError("the registry cannot be written: its file is read-only", where=str(path), hint=hint)
    meaning, hint = _MEANINGS.get(code(error), (f"failed: {error}", "orch doctor"))
    return RegistryError(f"the registry {meaning}", where=str(path), hint=hint)


def _is_writable(path: Path) -> bool:
    """Return whether the owner may write to the file; True if that is unknown."""
    try:
        return bool(path.stat().st_mode & stat.S_IWUSR)
    except OSError:
        return True


def log_without_place(path: Path) -> str:
    """Return why a registry cannot keep its write-ahead log next to itself; "" if SQLite can read it.

    SQLite must write there even to read, and does not report that it cannot.
    """
    try:
        mounted_readonly = os.statvfs(path.parent).f_flag & os.ST_RDONLY
    except OSError:
        return ""
    if not mounted_readonly and os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        return (_MOUNT if mounted_readonly else _FOLDER) if code(error) in _UNWRITABLE else ""
    return ""


def _access_error(path: Path) -> RegistryError | None:
    """Return the file system's error on opening the file, which SQLite reports as an I/O error or not at all."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return None  # the file or its folder is inaccessible or missing
    if is_folder:
        what, hint = "it is a folder", f"ORCH_REGISTRY names a file: {path / 'registry.db'}"
    elif not os.access(path, os.R_OK, effective_ids=True):
        what, hint = "permission denied", f"chmod u+rw {path}, or ask its owner"
    else:
        return None
    return RegistryError(f"the registry cannot be opened: {what}", where=str(path), hint=hint)


def foreign(path: Path) -> ForeignDatabase:
    """Return the error for a database that belongs to another program."""
    return ForeignDatabase(
        "the file is a database, but not an orch registry",
        where=str(path),
        hint="set ORCH_REGISTRY to a file that does not exist yet",
    )
