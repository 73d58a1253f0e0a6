"""Digests of existing files at reading speed: several threads, each of which digests a chunk as it reads it.

Files are read through the page cache, in pieces that are still in the core's own cache when they are digested. The
kernel reads ahead meanwhile, which a single thread with O_DIRECT cannot do. Pages that were not cached before are
dropped at once, so that verification does not evict the data of a trainer on the same machine.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

import xxhash

from checkpointing.storage.backends import LocalStorage, Storage

PIECE = 512 << 10
"""Bytes read from the page cache at once: half of a typical L2 cache."""
PAGE = mmap.PAGESIZE
_STRIDE = 8 << 20
_MOST = 4


def reader_threads() -> int:
    """Return the thread count: at least two, so that one reads while the other digests; four saturate one process."""
    return min(_MOST, max(2, len(os.sched_getaffinity(0))))


class ByteRange(Protocol):
    """Work item of a digest: `length` bytes of a file from `offset` on."""

    @property
    def name(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...


R = TypeVar("R", bound=ByteRange)


class Digester(Protocol):
    """Digester of byte ranges for one thread; keeps the last file open."""

    def digest(self, byte_range: ByteRange) -> str:
        """Return the xxh3-128 of the existing bytes (fewer if the file ends early); raises OSError."""

    def close(self) -> None: ...


def digester_factory(storage: Storage, folder: str, before: "PageCacheState | None" = None) -> Callable[[], Digester]:
    """Return a factory of per-thread digesters for the files in one folder of a storage.

    If `before.keeps` is set, read pages stay in the page cache until `before.drop_new_pages`.
    """
    # A storage with its own `open` is read through its own streams.
    if isinstance(storage, LocalStorage) and type(storage).open is LocalStorage.open:
        root, known = storage.root / folder, before or PageCacheState()
        return lambda: _LocalDigester(root, known)
    return lambda: _StreamDigester(storage, folder)


class DigestScan(Generic[R]):
    """A pass over byte ranges; `on_digest` is called after each, by one thread at a time."""

    def __init__(self, make: Callable[[], Digester], on_digest: Callable[[R, str | OSError], None]) -> None:
        self._make, self._on_digest = make, on_digest
        self._lock, self._stopped = threading.Lock(), False
        self._left: Iterator[R] = iter(())

    def run(self, byte_ranges: Sequence[R], threads: int | None = None) -> None:
        """Digest everything; raises what `on_digest` raises."""
        self._left = iter(byte_ranges)
        count = max(1, min(threads or reader_threads(), len(byte_ranges)))
        with ThreadPoolExecutor(count, thread_name_prefix="verify") as pool:
            work = [pool.submit(self._work) for _ in range(count)]
            try:
                for future in work:
                    future.result()
            finally:
                self._stopped = True  # an interrupted scan ends after the chunks now being read

    def _work(self) -> None:
        digester = self._make()
        try:
            while (byte_range := self._next()) is not None:
                found: str | OSError
                try:
                    found = digester.digest(byte_range)
                except OSError as error:
                    found = error
                with self._lock:
                    self._on_digest(byte_range, found)
        finally:
            digester.close()

    def _next(self) -> R | None:
        with self._lock:
            return None if self._stopped else next(self._left, None)


class _StreamDigester:
    """Digester that reads through a storage's own streams."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._name = ""
        self._stream: BinaryIO | None = None

    def digest(self, byte_range: ByteRange) -> str:
        if self._name != byte_range.name or self._stream is None:
            self.close()
            self._stream = self._storage.open(f"{self._folder}/{byte_range.name}")
            self._name = byte_range.name
        self._stream.seek(byte_range.offset)
        return xxhash.xxh3_128_hexdigest(self._stream.read(byte_range.length))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class PageCacheState:
    """Page cache residency before a scan; shared by its threads because the kernel's read-ahead is shared too.

    Pages that were not resident are dropped at once, unless `keeps` is set for a later second reading.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self._lock = threading.Lock()
        self._files: dict[str, list[bool]] = {}

    def cached_ranges(self, name: str, descriptor: int) -> list[bool]:
        """Return for every 8 MiB of a file whether they were cached, judged by the page in the middle."""
        with self._lock:
            if name not in self._files:
                size = os.fstat(descriptor).st_size
                places = (min(start + _STRIDE // 2, (start + size) // 2) for start in range(0, size, _STRIDE))
                self._files[name] = [_resident(descriptor, place // PAGE * PAGE) for place in places]
            return self._files[name]

    def drop_new_pages(self, root: Path) -> None:
        """Drop all pages of the examined files below `root` that were not cached before."""
        with self._lock:
            for name, warm in self._files.items():
                try:
                    descriptor = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    continue  # a deleted file has no cached pages
                try:
                    for at in (at for at, was_there in enumerate(warm) if not was_there):
                        os.posix_fadvise(descriptor, at * _STRIDE, _STRIDE, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


class _LocalDigester:
    """Digester of files on a mounted file system, which reads piece by piece into one reused buffer."""

    def __init__(self, root: Path, before: PageCacheState) -> None:
        self._root, self._before = root, before
        self._name, self._descriptor = "", -1
        self._warm: list[bool] = []
        self._piece = memoryview(mmap.mmap(-1, PIECE))

    def digest(self, byte_range: ByteRange) -> str:
        if self._name != byte_range.name:
            self._open(byte_range.name)
        found = self._read(byte_range)
        if not self._before.keeps and not self._was_warm(byte_range):
            os.posix_fadvise(self._descriptor, byte_range.offset, byte_range.length, os.POSIX_FADV_DONTNEED)
        return found

    def _read(self, byte_range: ByteRange) -> str:
        done, digest = 0, xxhash.xxh3_128()
        while done < byte_range.length:
            wanted = self._piece[: min(PIECE, byte_range.length - done)]
            count = os.preadv(self._descriptor, [wanted], byte_range.offset + done)
            if count == 0:
                break
            digest.update(self._piece[:count])
            done += count
        return digest.hexdigest()

    def _was_warm(self, byte_range: ByteRange) -> bool:
        return any(self._warm[byte_range.offset // _STRIDE : -(-(byte_range.offset + byte_range.length) // _STRIDE)])

    def _open(self, name: str) -> None:
        self.close()
        self._descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        self._name, self._warm = name, self._before.cached_ranges(name, self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            # Also drop what the kernel read ahead beyond the last chunk.
            if not self._before.keeps and not any(self._warm):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._descriptor)
        self._name, self._descriptor = "", -1


_LIBC = ctypes.CDLL(None, use_errno=True)


def _resident(descriptor: int, offset: int) -> bool:
    """Return whether the file's page at `offset` is in the page cache, without loading it."""
    try:
        # A private mapping: ctypes exposes the address of writable mappings only. Nothing is written to it.
        mapped = mmap.mmap(descriptor, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    except ValueError:
        return False  # the file ends before
    with mapped as page:
        start = ctypes.c_char.from_buffer(page)
        seen = (ctypes.c_ubyte * 1)()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(PAGE), seen)
        del start  # the mapping cannot be closed while its address is referenced
    return failed == 0 and bool(seen[0] & 1)
