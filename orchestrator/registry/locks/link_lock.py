"""A lock by link(), around write transactions where fcntl locks are not known to reach other hosts.

link() makes a name or fails, on every file system that has it; that it succeeded shows in the number of links, whatever
a network file system answered. A holder that died leaves the name behind: on this host its process is looked at;
another host's lock is taken away when this process has seen the very same one for `STALE_SECONDS` of its own clock.
"""

import contextlib
import json
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import RegistryError
from trainer.contract.node_identity import boot_id, is_visible, process_space, start_time

STALE_SECONDS = 45.0
"""Longer than any write transaction takes: those wait for SQLite for seconds."""
PATIENCE = 75.0


class LinkLock:
    """One per open registry; any number of threads and processes may hold it in turn."""

    def __init__(
        self,
        registry: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[], None] = lambda: time.sleep(random.uniform(0.005, 0.05)),
    ) -> None:
        self.path = registry.with_name(f"{registry.name}.lock")
        self._clock, self._pause = clock, pause
        self._seen: tuple[str | None, float] = (
            None,
            0.0,
        )  # somebody else's lock, and since when this process has seen it

    @contextmanager
    def hold(self) -> Iterator[Callable[[], None]]:
        """Hold the lock; yields a check to make before the commit, which raises RegistryError if it is lost."""
        mine = _identity()
        self._acquire(mine)
        try:
            yield lambda: self._check(mine)
        finally:
            if self._holder() == mine:
                self.path.unlink(missing_ok=True)

    def _acquire(self, mine: str) -> None:
        give_up = self._clock() + PATIENCE
        while not self._linked(mine):
            holder = self._holder()
            if holder is not None and self._is_stale(holder):
                self._break(holder)
                continue
            if self._clock() > give_up:
                raise self._busy(holder or "")
            self._pause()

    def _linked(self, mine: str) -> bool:
        own = self._own()
        try:
            _write_new(own, mine)
            with contextlib.suppress(OSError):  # an answer may be lost; the number of links is not
                os.link(own, self.path)
            return os.stat(own).st_nlink == 2
        except OSError as error:
            raise RegistryError(
                f"the registry's lock cannot be made: {error.strerror}", where=str(self.path), hint="orch doctor"
            ) from error
        finally:
            own.unlink(missing_ok=True)

    def _own(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")

    def _holder(self) -> str | None:
        """Who has the lock, None when nobody has; a crash of its host may have left it empty."""
        try:
            return self.path.read_text(errors="replace")
        except OSError:
            return None

    def _is_stale(self, holder: str) -> bool:
        who = _parsed(holder)
        # On this host the process itself can be looked at (not in another container); after a boot it is gone.
        if who.get("host") == socket.gethostname() and "pid" in who and is_visible(who.get("space", "")):
            return who.get("boot") != boot_id() or start_time(int(who["pid"])) != who.get("started")
        now = self._clock()
        if self._seen[0] != holder:
            self._seen = (holder, now)
        return now - self._seen[1] >= STALE_SECONDS

    def _break(self, holder: str) -> None:
        """Take a dead holder's lock away: by a rename, of which one of several succeeds."""
        taken = self._own()
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, taken)
            # A living one's may have come between the look and the rename; it checks before it commits.
            if taken.read_text() != holder:
                with contextlib.suppress(FileExistsError):
                    os.link(taken, self.path)
            taken.unlink()

    def _check(self, mine: str) -> None:
        if self._holder() != mine:
            raise RegistryError(
                "the registry's lock was taken by another process in mid transaction: nothing was written",
                where=str(self.path),
                hint="try again; `orch controller status` shows who writes",
            )

    def _busy(self, holder: str) -> RegistryError:
        who = _parsed(holder)
        return RegistryError(
            f"the registry is locked by process {who.get('pid', '?')} on {who.get('host', 'another host')}",
            where=str(self.path),
            hint="another orch process is writing; try again (`orch controller status` shows who)",
        )


def _identity() -> str:
    """This process, and this one time that it takes the lock."""
    pid = os.getpid()
    space = process_space()
    who = {"host": socket.gethostname(), "boot": boot_id(), "space": space, "pid": pid, "started": start_time(pid)}
    return json.dumps({**who, "nonce": secrets.token_hex(8)})


def _parsed(holder: str) -> dict[str, str]:
    try:
        found = json.loads(holder)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_new(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
