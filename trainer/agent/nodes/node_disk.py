"""Folders on a node's own disk that a user's jobs share: private, locked while in use, and deleted by age."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from string import Template

from checkpointing.storage.storage_errors import FULL, error_words
from checkpointing.storage.trusted_path import check_private, own_name

ARCHIVE, FOLDER, DISK = "staged archive", "node folder", "node disk"
"""Checks of a node's preparation: the archive, the folder on the node's disk, and room on that disk."""
CACHES = "caches-"
"""Begins the names of the folders of `cluster.caches`, which may lie beside unpacked archives."""
_DAY = 86400.0


class NotPrepared(Exception):
    """Raised if the node cannot be prepared; `check` names the cause."""

    def __init__(self, reason: str, *, check: str = ARCHIVE) -> None:
        super().__init__(reason)
        self.check = check


def explain_folder_error(key: str, text: str, error: OSError) -> NotPrepared:
    """Return why the folder that a configuration key names cannot be used on this node, and what to type."""
    full = error.errno in FULL or error.errno == errno.EIO
    what = f"{key}={text} cannot be used on this node: {error_words(error)}"
    do = f"`orch resume RUN {key}=FOLDER` chooses a folder that you may write to on every node"
    return NotPrepared(f"{what}; {do}", check=DISK if full else FOLDER)


def make_own_folder(key: str, text: str, environ: Mapping[str, str]) -> Path:
    """Create the user's private folder below `text`, with this node's variables, and return it. Raises NotPrepared.

    `key` is the configuration key that has `text`.
    """
    try:
        above = Path(Template(text).substitute({"USER": own_name(), **environ}))
    except KeyError as error:
        what = f"{key}={text}: the variable {error.args[0]} is not set on this node"
        raise NotPrepared(f"{what}; `orch resume RUN {key}=FOLDER` names another folder", check=FOLDER) from error
    except ValueError as error:  # `$` without a name
        raise NotPrepared(f"{key}={text}: {error}; type $$ for a dollar sign", check=FOLDER) from error
    if not above.is_absolute():
        raise NotPrepared(f"{key}={text}: must be an absolute path", check=FOLDER)
    folder = above / f"orch-{own_name()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
    except OSError as error:
        raise explain_folder_error(key, text, error) from error
    return folder


OnWait = Callable[[Path], None]
"""Function that gets the file of a lock that another process holds, before the wait for it."""


def ignore_wait(lock_file: Path) -> None:
    """Record nothing about a wait."""


class FolderLock:
    """Lock on a folder, held by the file `.NAME.lock` beside it until `release` or the end of the process.

    Its file's modification time is the time of the folder's last use.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor = folder, descriptor

    @classmethod
    def use(cls, folder: Path, on_wait: OnWait = ignore_wait) -> "FolderLock":
        """Return a shared lock. The folder is not deleted while this process lives. Waits for an exclusive one."""
        lock = cls._wait(folder, fcntl.LOCK_SH, on_wait)
        os.utime(lock._descriptor)
        return lock

    @classmethod
    def own(cls, folder: Path, on_wait: OnWait = ignore_wait) -> "FolderLock":
        """Return an exclusive lock, once no other process has a lock."""
        return cls._wait(folder, fcntl.LOCK_EX, on_wait)

    @classmethod
    def _wait(cls, folder: Path, operation: int, on_wait: OnWait) -> "FolderLock":
        lock = cls._take(folder, operation | fcntl.LOCK_NB)
        if lock is None:
            on_wait(_lock_file(folder))
            lock = cls._take(folder, operation)
        assert lock is not None
        return lock

    @classmethod
    def own_unused(cls, folder: Path) -> "FolderLock | None":
        """Return an exclusive lock, or None if another process has a lock."""
        return cls._take(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def _take(cls, folder: Path, operation: int) -> "FolderLock | None":
        path = _lock_file(folder)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _is_file(descriptor, path):
                return cls(folder, descriptor)
            os.close(descriptor)  # it was deleted with its folder in the meantime

    def share(self) -> None:
        """Turn an exclusive lock into a shared one."""
        os.utime(self._descriptor)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def delete(self) -> None:
        """Delete the folder and the lock."""
        delete_tree(self.folder)
        if not self.folder.exists():
            _lock_file(self.folder).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        os.close(self._descriptor)


def delete_tree(folder: Path) -> None:
    """Delete a folder as far as possible, with folders that their owner may not write to, as an archive can have."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    with suppress(OSError):  # another user's
        folder.chmod(0o700)
        for place, folders, _ in os.walk(folder):
            for path in (Path(place, name) for name in folders):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def delete_unused(above: Path, days: float, now: float | None = None, *, caches: bool) -> list[Path]:
    """Delete the caches of runs in `above`, or the other folders, that no process has used for `days`; return them."""
    oldest = (time.time() if now is None else now) - days * _DAY
    deleted = []
    for folder in sorted(path for path in above.iterdir() if not path.name.startswith(".")):
        if folder.name.startswith(CACHES) is not caches:
            continue
        with suppress(FileNotFoundError):  # not made by `FolderLock`, or deleted by another job
            if _lock_file(folder).stat().st_mtime >= oldest or (lock := FolderLock.own_unused(folder)) is None:
                continue
            lock.delete()
            deleted.append(folder)
    return deleted


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
