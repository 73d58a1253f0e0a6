"""The registry: every read and every write of it is a verb of the Store."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from orchestrator.errors import RegistryError
from orchestrator.registry import faults, migrate, quick
from orchestrator.registry.asking import Asking
from orchestrator.registry.database import Database
from orchestrator.registry.deciding import Deciding
from orchestrator.registry.filesystem import mounted
from orchestrator.registry.leasing import Leasing
from orchestrator.registry.link_lock import LinkLock
from orchestrator.registry.locking import Locking, locking_for
from orchestrator.registry.reading import Reading
from orchestrator.registry.recording import write_records
from orchestrator.registry.restoring import Restoring
from orchestrator.registry.submitting import Submitting
from orchestrator.registry.versions import HEAD, KNOWN

T = TypeVar("T")


class Store(Reading, Asking, Leasing, Deciding, Submitting, Restoring):
    """The open registry. Each write is one durable transaction, tried again while another process writes."""

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Self:
        """Open the registry, made or migrated first when it must be; raises RegistryError."""
        path = path.absolute()
        lock: LinkLock | None = None
        if not readonly:
            locking = _made_ready(path)
            lock = LinkLock(path) if locking.linked else None
            with lock.hold() if lock else nullcontext():
                migrate.set_journal(path, locking.journal)
        elif not path.exists():
            raise RegistryError("there is no registry yet", where=str(path), hint="orch submit makes one")
        found = quick.version(path)
        if found is not None and found not in KNOWN:
            raise faults.newer(found, path)
        if found != HEAD:
            if readonly:
                raise faults.older(str(found), path)
            with lock.hold() if lock else nullcontext():
                migrate.upgrade(path)
        store = cls(Database(path, readonly=readonly, lock=lock))
        store.database.after_commit = lambda runs: write_records(store, runs)
        return store

    def together(self, work: Callable[[], T]) -> T:
        """Run several verbs as one transaction; `work` must be repeatable, since a busy registry runs it again."""
        return self.database.write(lambda _: work())

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _made_ready(path: Path) -> Locking:
    """Make the file where it may be, readable by its owner alone, before SQLite makes it with the ambient umask."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        locking = locking_for(path, mounted(path.parent))
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise RegistryError(
            f"the registry cannot be written: {error.strerror}", where=str(path), hint=f"set {faults.ELSEWHERE}"
        ) from error
    return locking
