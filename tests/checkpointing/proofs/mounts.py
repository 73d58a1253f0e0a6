"""Real file systems that are small, turn read-only or hang: mounted for one test, by root.

Test processes have a mount namespace of their own, so that mounts are gone with them however they end.
"""

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LONGEST_FREEZE_S = 30
_CLONE_NEWNS = 0x20000  # sched.h


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Make a folder whose files can leave the page cache; those of other tests may be in memory."""
    with tempfile.TemporaryDirectory(prefix="orch-test-", dir="/var/tmp") as folder:
        yield Path(folder)


def hide_mounts() -> bool:
    """From now on only this process and its children see what they mount; False where that is impossible.

    To be called before any process is started that is to see a mount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS):
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False).returncode == 0


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def _mounted(folder: Path, *how: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder.mkdir()
    _run("mount", *how, str(folder))
    try:
        yield folder
    finally:
        # Lazily: what a test has killed, or left open, may hold files there for a while.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield folder


def fill(folder: Path) -> Path:
    """Fill this file system; returns the file that does."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while stream.write(bytes(size)):
                    pass
    return filler


@contextmanager
def ramfs(folder: Path) -> Iterator[Path]:
    """A file system without O_DIRECT and fallocate."""
    with _mounted(folder, "-t", "ramfs", "ramfs"):
        yield folder


@contextmanager
def loop_ext4(folder: Path, megabytes: int) -> Iterator[Path]:
    """An ext4 of its own, in a file beside `folder`."""
    image = folder.with_suffix(".image")
    with image.open("wb") as stream:
        stream.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", str(image))
    with _mounted(folder, "-o", "loop", str(image)):
        yield folder
    image.unlink()


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Every write below `folder` hangs; a watchdog thaws the file system even when this process dies."""
    _run("fsfreeze", "--freeze", str(folder))
    thaw = f"sleep {_LONGEST_FREEZE_S}; fsfreeze --unfreeze {folder}"
    watchdog = subprocess.Popen(["sh", "-c", thaw], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)
        os.killpg(watchdog.pid, 9)
        watchdog.wait()


def remount(folder: Path, how: str) -> None:
    """`ro` or `rw`."""
    _run("mount", "-o", f"remount,{how}", str(folder))
