"""One order to write: the files of a rank's buffer, digested while they are written, vouched for in the arena."""

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from checkpointing.format.manifest import FileEntry
from checkpointing.storage.backends import LocalStorage, Storage, storage_at
from checkpointing.storage.digests import CHUNK, DigestSink, digest, filled_digest
from checkpointing.storage.direct_io import BLOCK, write_direct
from checkpointing.storage.durable import fsync_dir, make_folder
from checkpointing.writer.arena import Arena, Record
from checkpointing.writer.order_threads import CancelToken

_MOST_AT_ONCE = 4
_HEAD_START = 0.001


@dataclass(frozen=True, kw_only=True)
class WriteOrder:
    """Write parts of a buffer as new files of a checkpoint; with `publish`, vouch for the buffer in the arena.

    With `places`, one for each of `files`, they are regions of files that other ranks write to as well.
    """

    place: str  # root path or URL
    folder: str
    buffer: int
    files: tuple[tuple[str, int, int], ...]  # name, offset in the buffer, size
    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    plan: str
    publish: bool = True
    places: tuple[tuple[str, int], ...] = ()  # name, offset in the file


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """What is durable now; `direct` when all of it went past the page cache.

    `filled` has the digest of each file's last chunk with zeros up to that chunk's end.
    """

    files: tuple[FileEntry, ...]
    filled: tuple[str, ...] = ()
    seconds: float
    direct: bool


class _Target(Protocol):
    """The folder of one checkpoint in one place."""

    def write(self, name: str, data: memoryview, at: int | None = None) -> bool: ...

    def finish(self) -> None: ...


class _LocalTarget:
    """A folder of a mounted file system."""

    def __init__(self, folder: Path, cancel_token: CancelToken) -> None:
        self._folder, self._cancel_token = folder, cancel_token
        make_folder(folder)

    def write(self, name: str, data: memoryview, at: int | None = None) -> bool:
        return write_direct(self._folder / name, data, cancelled=self._cancel_token.cancelled, at=at)

    def finish(self) -> None:
        fsync_dir(self._folder)


class _StorageTarget:
    """A folder of any storage; its sinks promise durability when they are closed."""

    def __init__(self, storage: Storage, folder: str, cancel_token: CancelToken) -> None:
        self._storage, self._folder, self._cancel_token = storage, folder, cancel_token

    def write(self, name: str, data: memoryview, at: int | None = None) -> bool:
        if at is not None:
            raise OSError(errno.EOPNOTSUPP, "several ranks cannot write one object", f"{self._folder}/{name}")
        sink = self._storage.create(f"{self._folder}/{name}")
        try:
            for start in range(0, len(data), BLOCK):
                self._cancel_token.check()
                sink.write(data[start : start + BLOCK])
            self._cancel_token.check()  # an object store shows the file from here on; by now it may be somebody else's
        except OSError:
            sink.abort()
            raise
        sink.close()
        return False

    def finish(self) -> None:
        pass


def _target(order: WriteOrder, storage: Storage | None, cancel_token: CancelToken) -> _Target:
    storage = storage if storage is not None else storage_at(order.place)
    # A storage that a test or a caller has made of a local one must see every byte.
    if type(storage) is LocalStorage:
        return _LocalTarget(storage.root / order.folder, cancel_token)
    return _StorageTarget(storage, order.folder, cancel_token)


def write_files(
    order: WriteOrder, arena: Arena, cancel_token: CancelToken, storage: Storage | None = None
) -> WriteResult:
    """Write, digest and vouch; raises OSError with its errno.

    When it returns or raises, nothing reads the buffer any more. The buffer is digested and vouched for even when it
    cannot be written: its copy in memory is as good as ever.
    """
    start = time.monotonic()
    if arena.plan != order.plan:
        raise OSError(errno.ESTALE, "the buffers are laid out for another plan")
    buffer = arena.buffer(order.buffer)
    parts = [(name, buffer[offset : offset + size]) for name, offset, size in order.files]
    targets: list[tuple[str, int | None]] = [*order.places] or [(name, None) for name, *_ in order.files]
    regions = [(name, data, at) for (name, at), (_, data) in zip(targets, parts, strict=True)]
    digest_thread = _DigestThread(order, arena, parts, cancel_token)
    digest_thread.start()
    try:
        target = _target(order, storage, cancel_token)
        direct = _write_all(target, regions)
        target.finish()
    finally:
        digest_thread.join()
    cancel_token.check()
    assert digest_thread.files is not None
    filled = tuple(digest_thread.filled)
    return WriteResult(files=digest_thread.files, filled=filled, seconds=time.monotonic() - start, direct=direct)


def put_file(
    storage: Storage, folder: str, name: str, blob: bytes, quiet: Callable[[], None] | None = None
) -> FileEntry:
    """Write one small file durably; raises OSError. Before it waits for the disk it calls `quiet`.

    An fsync amid large writes waits for all of them that are queued, and keeps the disk from the next ones.
    """
    with DigestSink(storage.create(f"{folder}/{name}")) as sink:
        sink.write(blob)
        if quiet is not None:
            quiet()
    return FileEntry(name=name, size=sink.size, chunks=sink.chunks)


def _write_all(target: _Target, parts: Sequence[tuple[str, memoryview, int | None]]) -> bool:
    """Write a few files at a time; raises the first failure when all have stopped."""
    if len(parts) < 2:
        return all([target.write(*part) for part in parts])
    left = list(reversed(parts))
    direct: list[bool] = []
    failures: list[Exception] = []

    def work() -> None:
        while not failures:
            try:
                part = left.pop()
            except IndexError:
                return
            try:
                direct.append(target.write(*part))
            except Exception as error:  # noqa: BLE001  # outermost edge
                failures.append(error)

    threads = [threading.Thread(target=work, name=f"file-{n}") for n in range(min(len(parts), _MOST_AT_ONCE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if len(direct) != len(parts):
        raise OSError(errno.EIO, f"{len(parts) - len(direct)} of {len(parts)} files were not written")
    return all(direct)


class _DigestThread(threading.Thread):
    """Digests the parts of a buffer beside their writing, then publishes the record."""

    def __init__(
        self, order: WriteOrder, arena: Arena, parts: Sequence[tuple[str, memoryview]], cancel_token: CancelToken
    ) -> None:
        super().__init__(name="inspector", daemon=True)
        self._order, self._arena, self._parts, self._cancel_token = order, arena, parts, cancel_token
        self.files: tuple[FileEntry, ...] | None = None
        self.filled: list[str] = []

    def run(self) -> None:
        # The writes go first: this thread begins on the core of the one that is about to hand them to the kernel, and
        # would keep it for a whole time slice.
        time.sleep(_HEAD_START)
        files = []
        for name, data in self._parts:
            chunks = self._digests(data)
            if self._cancel_token.halted():
                return
            files.append(FileEntry(name=name, size=len(data), chunks=chunks))
            if self._order.places:
                rest = len(data) % CHUNK
                self.filled.append(filled_digest(data[len(data) - rest :]) if rest else chunks[-1])
        self.files = tuple(files)
        if self._order.publish:
            self._publish(self.files)
        self._cancel_token.settled.set()

    def _digests(self, data: memoryview) -> tuple[str, ...]:
        starts = range(0, len(data), CHUNK)
        return tuple(digest(data[start : start + CHUNK]) for start in starts if not self._cancel_token.halted())

    def _publish(self, files: tuple[FileEntry, ...]) -> None:
        order = self._order
        record = Record(
            step=order.step, plan=order.plan, name=order.folder, extra=order.extra, files=files,
            places=tuple(offset for _, offset, _ in order.files),
        )  # fmt: skip
        # A record that outgrows its area costs the copy in memory its voucher, and nothing else.
        with contextlib.suppress(ValueError):
            self._cancel_token.unless_halted(lambda: self._arena.publish(order.buffer, record))
