"""Registry store: every read and write is a method of Store."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from orchestrator.errors import RegistryError
from orchestrator.registry import migrate, sqlite_errors, versions
from orchestrator.registry.controller_writes import ControllerWrites
from orchestrator.registry.database import Database
from orchestrator.registry.file_systems import choose_journal_mode, find_mount
from orchestrator.registry.run_record import write_records

T = TypeVar("T")


class Store(ControllerWrites):
    """An open registry. Each write is one durable transaction, which is retried while another process writes."""

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Self:
        """Open the registry, after upgrading an older one and creating a missing one. Raises RegistryError.

        `readonly` creates none.
        """
        path = path.absolute()
        if not readonly:
            _prepare(path)
        elif (found := versions.read_version(path)) is None:
            raise RegistryError("there is no registry yet", where=str(path), hint="`orch submit` creates one")
        else:
            migrate.upgrade_to_read(path, found)
        store = cls(Database(path, readonly=readonly))
        store.database.after_commit = lambda runs: write_records(store, runs)
        return store

    @property
    def path(self) -> Path:
        return self.database.path

    def together(self, work: Callable[[], T]) -> T:
        """Run several methods as one transaction. `work` must be repeatable, because a busy registry runs it again."""
        return self.database.write(work)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prepare(path: Path) -> None:
    journal = _make(path)
    found = versions.read_version(path)
    versions.require_known(found, path)  # before anything in the file changes
    migrate.set_journal(path, journal)
    if found != versions.HEAD:
        migrate.upgrade(path)


def _make(path: Path) -> str:
    """Create the file, readable only by its owner, before SQLite would create it with the process's umask.

    Returns its journal mode. An existing file is not opened, because that would drop this process's locks on it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = choose_journal_mode(path, find_mount(path.parent))
        with suppress(FileExistsError):
            os.close(os.open(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "its file or mount is read-only")
    except OSError as error:
        raise RegistryError(
            f"the registry cannot be written: {error.strerror}", where=str(path), hint=f"set {sqlite_errors.ELSEWHERE}"
        ) from error
    return journal
