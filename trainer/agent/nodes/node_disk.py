"""Folders on a node's own disk that a user's jobs share: private, locked while in use, and deleted by age."""

import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Template

from checkpointing.storage.trusted_path import check_private, own_name

CACHES = "caches-"
"""Begins the names of the folders of `cluster.caches`, which may lie beside unpacked archives."""
_DAY = 86400.0


def make_own_folder(text: str, environ: Mapping[str, str]) -> Path:
    """Create the user's private folder below `text`, with this node's variables, and return it. Raises OSError.

    Raises ValueError for an unset variable or a relative path.
    """
    try:
        above = Path(Template(text).substitute({"USER": own_name(), **environ}))
    except KeyError as error:
        raise ValueError(f"{text}: the variable {error.args[0]} is not set on this node") from error
    if not above.is_absolute():
        raise ValueError(f"{text}: must be an absolute path")
    folder = above / f"orch-{own_name()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    return folder


class FolderLock:
    """Lock on a folder, held by the file `.NAME.lock` beside it until `release` or the end of the process.

    Its file's modification time is the time of the folder's last use.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor = folder, descriptor

    @classmethod
    def use(cls, folder: Path) -> "FolderLock":
        """Return a shared lock. The folder is not deleted while this process lives. Waits for an exclusive one."""
        lock = cls._take(folder, fcntl.LOCK_SH)
        assert lock is not None
        os.utime(lock._descriptor)
        return lock

    @classmethod
    def own(cls, folder: Path) -> "FolderLock":
        """Return an exclusive lock, once no other process has a lock."""
        lock = cls._take(folder, fcntl.LOCK_EX)
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
