"""Storages that record what is done to them, or that fail at a chosen moment."""

import errno
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import Sink


@dataclass
class _RecordedFile:
    path: str
    inner: Sink
    log: list[tuple[Any, ...]]

    def write(self, data: Any) -> int:
        self.log.append(("write", self.path, bytes(data)))
        return self.inner.write(data)

    def close(self) -> None:
        self.inner.close()
        self.log.append(("close", self.path))

    def abort(self) -> None:
        self.inner.abort()


@dataclass
class Recording(LocalStorage):
    """A local storage that notes every change in the order in which it is made."""

    root: Path
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def create(self, path: str) -> Sink:
        self.log.append(("create", path))
        return _RecordedFile(path, super().create(path), self.log)

    def publish(self, path: str, data: bytes) -> None:
        super().publish(path, data)
        self.log.append(("publish", path, data))

    def delete(self, path: str) -> None:
        super().delete(path)
        self.log.append(("delete", path))


def replay(log: list[tuple[Any, ...]], root: Path, *, power_loss: bool) -> None:
    """Make the files that `log` leaves behind; after a power loss, writes that were not waited for are gone."""
    files: dict[str, bytes] = {}
    closed = {entry[1] for entry in log if entry[0] == "close"}
    for entry in log:
        kind, path = entry[0], entry[1]
        if kind == "create":
            files[path] = b""
        elif kind == "write" and (path in closed or not power_loss):
            files[path] += entry[2]
        elif kind == "publish":
            files[path] = entry[2]
        elif kind == "delete":
            files.pop(path, None)
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


@dataclass
class _FaultyFile:
    inner: Sink
    path: str
    storage: "Faulty"

    def write(self, data: Any) -> int:
        self.storage.meet(f"write {self.path}", len(data))
        return self.inner.write(data)

    def close(self) -> None:
        try:
            self.storage.meet(f"fsync {self.path}", 0)
        except OSError:
            self.inner.abort()
            raise
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()


@dataclass
class Faulty(LocalStorage):
    """A local storage whose operations fail while `broken` says so; it gets the operation and the bytes so far.

    While `hung` says so of an operation, it does not come to an end before `healed` is set, like on a dead mount.
    """

    root: Path
    broken: Callable[[str, int], int] = lambda operation, written: 0
    hung: Callable[[str], bool] = lambda operation: False
    healed: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    written: int = 0

    def meet(self, operation: str, size: int) -> None:
        if self.hung(operation):
            self.met.set()
            assert self.healed.wait(60.0), "the test did not heal the file system"
        self.written += size
        number = self.broken(operation, self.written)
        if number:
            raise OSError(number, os.strerror(number), str(self.root))

    def create(self, path: str) -> Sink:
        self.meet(f"create {path}", 0)
        return _FaultyFile(super().create(path), path, self)

    def publish(self, path: str, data: bytes) -> None:
        self.meet(f"publish {path}", len(data))
        super().publish(path, data)

    def open(self, path: str) -> Any:
        self.meet(f"open {path}", 0)
        return super().open(path)

    def list(self, path: str) -> dict[str, int | None]:
        self.meet(f"list {path}", 0)
        return super().list(path)

    def delete(self, path: str) -> None:
        self.meet(f"delete {path}", 0)
        super().delete(path)


def full_after(size: int) -> Callable[[str, int], int]:
    """A disk that takes `size` bytes and no more."""
    return lambda operation, written: errno.ENOSPC if operation.startswith("write") and written > size else 0


def failing_at(number: int, error: int = errno.EIO, operation: str = "write") -> Callable[[str, int], int]:
    """A disk on which the `number`-th operation of a kind (counting from 1) fails, that one only."""
    count = itertools.count(1)
    return lambda met, written: error if met.startswith(operation) and next(count) == number else 0


def read_only(operation: str, written: int) -> int:
    """A disk that was mounted again without the right to write."""
    return 0 if operation.startswith(("open", "list")) else errno.EROFS
