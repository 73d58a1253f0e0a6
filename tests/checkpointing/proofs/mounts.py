"""Real file systems that are small, turn read-only or hang: mounted for one test, by root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LONGEST_FREEZE_S = 30


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def small_tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def loop_ext4(folder: Path, megabytes: int) -> Iterator[Path]:
    """An ext4 of its own, in a file beside `folder`."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    image = folder.with_suffix(".image")
    folder.mkdir()
    with image.open("wb") as stream:
        stream.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", str(image))
    _run("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        image.unlink()


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Every write below `folder` hangs; a watchdog thaws it even when this process dies."""
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
