"""Write orders, the messages between a rank and its writer, and the threads that carry out orders.

A message is a 4-byte length, the header, and a blob whose size is in the header's `blob`.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from checkpointing.format.manifest import FileEntry
from checkpointing.message_codec import decode, encode, peer_message
from checkpointing.storage.backends import LocalStorage, Storage, open_storage
from checkpointing.storage.digests import CHUNK, digest, filled_digest
from checkpointing.storage.direct_io import BLOCK, write_direct
from checkpointing.storage.durable import fsync_dir, make_folder
from checkpointing.writer.arena import Arena, BufferRecord

T = TypeVar("T")


class CancelToken:
    """Cancels one order.

    `cancel` stops its I/O between two blocks; `halt` also stops its access to memory and the arena. A cancelled order
    still digests its buffer and publishes the record: that copy is complete and may be the only one left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled, self._halted = threading.Event(), False
        self.settled = threading.Event()
        """Set once the order needs the buffer's bytes only for writing them out."""

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def sleep(self, seconds: float) -> None:
        """Sleep, but wake up immediately when the order is cancelled."""
        self._cancelled.wait(seconds)

    def check(self) -> None:
        """Raise OSError (ECANCELED) once the order is cancelled."""
        if self._cancelled.is_set():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def halt(self) -> None:
        """Cancel the order. Afterwards, no action guarded by `unless_halted` starts or runs."""
        self._cancelled.set()
        with self._lock:
            self._halted = True

    def is_halted(self) -> bool:
        return self._halted

    def unless_halted(self, act: Callable[[], None]) -> None:
        """Call `act` while `halt` is locked out. Do nothing after a halt."""
        with self._lock:
            if not self._halted:
                act()


class OrderThreads:
    """Threads for orders, one each, so that an order hanging in the kernel on a dead disk does not block the others."""

    def __init__(self) -> None:
        self._running: set[CancelToken] = set()
        self._readers: dict[CancelToken, str] = {}
        self._changed = threading.Condition()

    def start(self, act: Callable[[CancelToken], T], *, reads_memory_for: str = "") -> "Future[T]":
        """Start an order. The future receives its result or exception.

        `reads_memory_for` is the path or URL to which the order writes data from the arena.
        """
        cancel_token, future = CancelToken(), Future[T]()
        future.set_running_or_notify_cancel()  # threads cannot be cancelled; `cancel` here asks the order to stop
        if reads_memory_for:
            self._readers[cancel_token] = reads_memory_for
        else:
            cancel_token.settled.set()
        self._running.add(cancel_token)
        # A daemon thread, so that an exiting process does not wait for a disk that never answers.
        thread = threading.Thread(target=self._run, args=(cancel_token, future, act), name="order", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            self._end(cancel_token)
            raise
        return future

    def _run(self, cancel_token: CancelToken, future: "Future[T]", act: Callable[[CancelToken], T]) -> None:
        try:
            result = act(cancel_token)
        except Exception as error:  # noqa: BLE001  # outermost edge
            self._end(cancel_token)
            future.set_exception(error)
        else:
            self._end(cancel_token)
            future.set_result(result)

    def _end(self, cancel_token: CancelToken) -> None:
        cancel_token.settled.set()
        self._running.discard(cancel_token)
        with self._changed:
            self._readers.pop(cancel_token, None)
            self._changed.notify_all()

    def until_unread(self, place: str) -> None:
        """Wait until no order is writing from memory to `place`.

        Orders for other disks, which may hang, do not matter.
        """
        with self._changed:
            self._changed.wait_for(lambda: place not in self._readers.values())

    def cancel(self) -> None:
        """Ask all orders to stop. Returns immediately."""
        for cancel_token in list(self._running):
            cancel_token.cancel()

    def quiesce(self, patience: float) -> None:
        """Cancel all orders, wait up to `patience` seconds for their digests, then prevent further records."""
        self.cancel()
        give_up = time.monotonic() + patience
        for cancel_token in list(self._running):
            cancel_token.settled.wait(max(0.0, give_up - time.monotonic()))
            cancel_token.halt()


_MOST_AT_ONCE = 4
_HEAD_START = 0.001


@peer_message
@dataclass(frozen=True, kw_only=True)
class WriteOrder:
    """Order to write parts of a buffer as new files of a checkpoint.

    With `publish`, the arena's record is published too. With `places`, one per file, the files are regions of files
    that other ranks also write to.
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


@peer_message
@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """Result of a write order whose files are durable. `direct` means that everything bypassed the page cache.

    `filled` has the digest of each file's last chunk, zero-padded to the chunk's end.
    """

    files: tuple[FileEntry, ...]
    filled: tuple[str, ...] = ()
    seconds: float
    direct: bool


def _write_part(
    storage: Storage, path: str, data: memoryview, at: int | None, cancel_token: CancelToken
) -> bool:  # fmt: skip
    """Write a file, or the region of a file that begins at `at`. Return True if the page cache was bypassed."""
    if _is_plain_folder(storage):
        return write_direct(storage.root / path, data, cancelled=cancel_token.is_cancelled, at=at)
    if at is not None:
        raise OSError(errno.EOPNOTSUPP, "several ranks cannot write to one object", path)
    sink = storage.create(path)
    try:
        for start in range(0, len(data), BLOCK):
            cancel_token.check()
            sink.write(data[start : start + BLOCK])
        cancel_token.check()  # closing makes an object visible, and another process may own the file by now
    except OSError:
        sink.abort()
        raise
    sink.close()
    return False


def _is_plain_folder(storage: Storage) -> TypeGuard[LocalStorage]:
    # A subclass of LocalStorage, for example in a test, must see every byte.
    return type(storage) is LocalStorage


def write_files(
    order: WriteOrder, arena: Arena, cancel_token: CancelToken, storage: Storage | None = None
) -> WriteResult:
    """Write and digest the files and publish the record. Raises OSError with its errno.

    Once it returns or raises, the buffer is no longer read. The buffer is digested and its record published even if
    the write fails, because the copy in memory is still good.
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
    storage = storage if storage is not None else open_storage(order.place)
    try:
        direct = _write_all(storage, order.folder, regions, cancel_token)
    finally:
        digest_thread.join()
    cancel_token.check()
    assert digest_thread.files is not None
    filled = tuple(digest_thread.filled)
    return WriteResult(files=digest_thread.files, filled=filled, seconds=time.monotonic() - start, direct=direct)


def _write_all(
    storage: Storage, folder: str, parts: Sequence[tuple[str, memoryview, int | None]], cancel_token: CancelToken
) -> bool:  # fmt: skip
    """Durably write a few files at a time. Once all threads have stopped, raise the first failure."""
    if _is_plain_folder(storage):
        make_folder(storage.root / folder)
    with ThreadPoolExecutor(max(1, min(len(parts), _MOST_AT_ONCE)), thread_name_prefix="file") as pool:
        writes = [
            pool.submit(_write_part, storage, f"{folder}/{name}", data, at, cancel_token) for name, data, at in parts
        ]
        try:
            for write in as_completed(writes):
                write.result()
        except SystemExit as error:  # a library must not end the writer
            raise OSError(errno.EIO, f"a file was not written: {error!r}") from error
        finally:
            pool.shutdown(cancel_futures=True)
    if _is_plain_folder(storage):
        fsync_dir(storage.root / folder)
    return all(write.result() for write in writes)


class _DigestThread(threading.Thread):
    """Thread that digests the parts of a buffer while they are written, then publishes the record."""

    def __init__(
        self, order: WriteOrder, arena: Arena, parts: Sequence[tuple[str, memoryview]], cancel_token: CancelToken
    ) -> None:
        super().__init__(name="inspector", daemon=True)
        self._order, self._arena, self._parts, self._cancel_token = order, arena, parts, cancel_token
        self.files: tuple[FileEntry, ...] | None = None
        self.filled: list[str] = []

    def run(self) -> None:
        # The writes go first. This thread starts on the core of the thread that is about to submit them, and would
        # occupy it for a whole time slice.
        time.sleep(_HEAD_START)
        files = []
        for name, data in self._parts:
            chunks = self._digests(data)
            if self._cancel_token.is_halted():
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
        return tuple(digest(data[start : start + CHUNK]) for start in starts if not self._cancel_token.is_halted())

    def _publish(self, files: tuple[FileEntry, ...]) -> None:
        order = self._order
        record = BufferRecord(
            step=order.step, plan=order.plan, name=order.folder, extra=order.extra, files=files,
            places=tuple(offset for _, offset, _ in order.files),
        )  # fmt: skip
        # If a record is too large for its area, the copy in memory merely has no record.
        with contextlib.suppress(ValueError):
            self._cancel_token.unless_halted(lambda: self._arena.publish(order.buffer, record))


_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 28

Message = tuple[dict[str, Any], bytes]


class MessageStream:
    """One end of a socket, which it owns. Any thread may send, but only one may receive."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)  # a program's `socket.setdefaulttimeout` must not affect this socket
        self._stream, self._lock = stream, threading.Lock()

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Send one whole message. Raises OSError if the other side is gone."""
        data = encode({**header, "blob": len(blob)})
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(data)) + data)
            if blob:
                self._stream.sendall(blob)

    def receive(self) -> Message | None:
        """Return the next message, or None if the other side is gone or sends malformed data."""
        try:
            head = self._exactly(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if head else 0
            data = self._exactly(length) if 0 < length <= _LONGEST_HEADER else b""
            header = decode(data) if data else None
            blob = self._exactly(header["blob"]) if header else b""
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return (header, blob) if header and len(blob) == header["blob"] else None

    def _exactly(self, size: int) -> bytes:
        """Return `size` bytes, or b"" if the stream ends first."""
        pieces, left = [], size
        while left:
            piece = self._stream.recv(min(left, 1 << 20))
            if not piece:
                return b""
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def disconnect(self) -> None:
        """Shut the connection down for both sides and wake up a reader. The descriptor stays open until `close`."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side disconnected first
            return

    def close(self) -> None:
        self._stream.close()


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return the JSON form of an error for a message."""
    if isinstance(error, OSError) and error.errno is not None:
        named = error.filename if isinstance(error.filename, (str, bytes, type(None))) else str(error.filename)
        return {"errno": error.errno, "text": error.strerror, "file": os.fsdecode(named) if named else None}
    return {"errno": None, "text": f"{type(error).__name__}: {error}"[:4000], "file": None}


def decode_error(fault: dict[str, Any]) -> OSError:
    """Return the error from a message, with its errno. An error without an errno becomes a plain OSError."""
    if fault["errno"] is None:
        return OSError(fault["text"])
    return OSError(fault["errno"], fault["text"], *([fault["file"]] if fault["file"] else []))
