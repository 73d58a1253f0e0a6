"""What is read in a run directory comes from the user's own one: on a shared root another may stand in its place."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from checkpointing.storage.durable import only_own_files
from checkpointing.storage.trusted_path import is_trusted, user_name

T = TypeVar("T")


class ForeignFolder(Exception):
    """The run directory is another user's, or was exchanged while it was read."""


def in_own_folder(folder: Path, work: Callable[[], T]) -> T:
    """The value of `work`, which reads no file of another user there; raises ForeignFolder, and what it raises."""
    before = _identity(folder)
    with only_own_files():
        value = work()
    if before is not None and _identity(folder) not in (None, before):
        raise ForeignFolder(f"the run directory was exchanged while it was read: {folder}")
    return value


def foreign(folder: Path) -> str:
    """Why a run directory must not be used; empty where it may, or is not there."""
    try:
        _identity(folder)
    except ForeignFolder as error:
        return str(error)
    return ""


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder it is; None where there is none. A link to it must be the user's as well."""
    try:
        for status in (os.lstat(folder), found := os.stat(folder)):
            if not is_trusted(status.st_uid):
                raise ForeignFolder(f"the run directory belongs to {user_name(status.st_uid)}: {folder}")
    except OSError:  # what uses it says so
        return None
    return found.st_dev, found.st_ino
