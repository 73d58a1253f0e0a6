"""Folders under construction: gone at the end, and when their maker was killed, gone once the next one is made.

A maker holds a lock on its draft, which the kernel lets go of however the maker ends. Locks may be known to one machine
only, where several share a file system, so a draft bears its machine's name and is nobody else's to take away.
"""

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(parent: Path, stem: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in `parent`; what is still there under its name at the end goes."""
    beginning = f".{stem}.{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())}."
    _sweep(parent, beginning)
    folder, descriptor = _create(parent, beginning, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _create(parent: Path, beginning: str, mode: int) -> tuple[Path, int]:
    """A draft, and the descriptor that holds its lock."""
    while True:
        folder = parent / f"{beginning}{secrets.token_hex(4)}.tmp"
        folder.mkdir(mode)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # somebody swept it before it was locked
        if _locked(descriptor, without_locks=True) and folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _sweep(parent: Path, beginning: str) -> None:
    """Take away what makers of this machine have left whose end came too early."""
    ours = re.compile(re.escape(beginning) + r"[0-9a-f]{8}\.tmp")
    for folder in parent.iterdir():
        if not ours.fullmatch(folder.name):
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone already
        try:
            if _locked(descriptor, without_locks=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int, *, without_locks: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks  # a file system without locks: drafts are made there, and none is swept
    return True
