"""Digests of files that are there, at the speed of reading: a few threads, each digests a chunk as it reads it.

A chunk that lies in the page cache is read from it, in pieces that are still in the core's own cache when they are
digested. Any other chunk is read past the page cache (O_DIRECT) where the file system allows that: verifying a
checkpoint must not throw out what a trainer on the same machine needs.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

import xxhash

from checkpointing.storage import LocalStorage, Storage

PIECE = 512 << 10
"""Bytes read from the page cache at once: half of a usual second-level cache."""
PAGE = mmap.PAGESIZE
_MOST = 4


def reader_threads() -> int:
    """Two threads at least, so that one reads while the other digests; four saturate what one process can get."""
    return min(_MOST, max(2, len(os.sched_getaffinity(0))))


class Reach(Protocol):
    """What is to be digested: `length` bytes of a file from `offset` on."""

    @property
    def name(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...


R = TypeVar("R", bound=Reach)


class Digester(Protocol):
    """Digests reaches of files for one thread; remembers the file of the last one."""

    def digest(self, reach: Reach) -> str:
        """xxh3-128 of the bytes that are there (fewer when the file ends early); raises OSError."""

    def close(self) -> None: ...


def digester_of(storage: Storage, folder: str) -> Callable[[], Digester]:
    """What makes a thread's digester of the files in one folder of a storage."""
    # A storage that opens files in its own way is read through its own streams.
    if isinstance(storage, LocalStorage) and type(storage).open is LocalStorage.open:
        root = storage.root / folder
        return lambda: _Local(root)
    return lambda: _Streams(storage, folder)


class Scan(Generic[R]):
    """One pass over some reaches: `tell` is called after each, by one thread at a time, with its digest or error."""

    def __init__(self, make: Callable[[], Digester], tell: Callable[[R, str | OSError], None]) -> None:
        self._make, self._tell = make, tell
        self._lock, self._stopped = threading.Lock(), False
        self._left: Iterator[R] = iter(())

    def run(self, reaches: Sequence[R], threads: int | None = None) -> None:
        """Digest everything; raises what `tell` raises."""
        self._left = iter(reaches)
        count = max(1, min(threads or reader_threads(), len(reaches)))
        with ThreadPoolExecutor(count, thread_name_prefix="verify") as pool:
            work = [pool.submit(self._work) for _ in range(count)]
            try:
                for future in work:
                    future.result()
            finally:
                self._stopped = True  # an interrupted scan ends with the chunks that are being read

    def _work(self) -> None:
        digester = self._make()
        try:
            while (reach := self._next()) is not None:
                found: str | OSError
                try:
                    found = digester.digest(reach)
                except OSError as error:
                    found = error
                with self._lock:
                    self._tell(reach, found)
        finally:
            digester.close()

    def _next(self) -> R | None:
        with self._lock:
            return None if self._stopped else next(self._left, None)


class _Streams:
    """Reads through a storage's own streams."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._name = ""
        self._stream: BinaryIO | None = None

    def digest(self, reach: Reach) -> str:
        if self._name != reach.name or self._stream is None:
            self.close()
            self._stream = self._storage.open(f"{self._folder}/{reach.name}")
            self._name = reach.name
        self._stream.seek(reach.offset)
        return xxhash.xxh3_128_hexdigest(self._stream.read(reach.length))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Local:
    """Reads files of a mounted file system into one page-aligned buffer that is used again and again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._name, self._cached, self._direct = "", -1, -1
        self._buffer: mmap.mmap | None = None

    def digest(self, reach: Reach) -> str:
        if self._name != reach.name:
            self._open(reach.name)
        if self._direct >= 0 and reach.offset % PAGE == 0 and reach.length > PIECE and not self._warm(reach):
            try:
                return self._past_cache(reach)
            except OSError as error:
                # Some file systems take the flag at open and refuse it at the first read.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                os.close(self._direct)
                self._direct = -1
        return self._through_cache(reach)

    def _open(self, name: str) -> None:
        self._shut()
        path = self._root / name
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = -1
        self._name = name

    def _warm(self, reach: Reach) -> bool:
        places = (reach.offset, reach.offset + reach.length // 2 // PAGE * PAGE)
        return all(_resident(self._cached, place) for place in places)

    def _past_cache(self, reach: Reach) -> str:
        """One read of whole pages; the last page of a file comes back as short as it is."""
        whole = -(-reach.length // PAGE) * PAGE
        view, got = self._view(whole), 0
        while got < reach.length:
            count = os.preadv(self._direct, [view[got:whole]], reach.offset + got)
            got += count
            if count == 0 or got % PAGE:
                break
        # Ended early, which a plain read may explain better: the file is short, or a part of the disk is bad.
        if got < reach.length:
            return self._through_cache(reach)
        return xxhash.xxh3_128_hexdigest(view[: reach.length])

    def _through_cache(self, reach: Reach) -> str:
        view, done, digest = self._view(PIECE), 0, xxhash.xxh3_128()
        while done < reach.length:
            count = os.preadv(self._cached, [view[: min(PIECE, reach.length - done)]], reach.offset + done)
            if count == 0:
                break
            digest.update(view[:count])
            done += count
        return digest.hexdigest()

    def _view(self, size: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = mmap.mmap(-1, size)
        return memoryview(self._buffer)

    def _shut(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._name, self._cached, self._direct = "", -1, -1

    def close(self) -> None:
        self._shut()
        self._buffer = None


_LIBC = ctypes.CDLL(None, use_errno=True)


def _resident(descriptor: int, offset: int) -> bool:
    """Whether the page of a file at `offset` is in the page cache; asking does not bring it there."""
    try:
        # A private mapping, since only a writable one tells ctypes its address; nothing is written to it.
        mapped = mmap.mmap(descriptor, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    except ValueError:
        return False  # the file ends before
    with mapped as page:
        start = ctypes.c_char.from_buffer(page)
        seen = (ctypes.c_ubyte * 1)()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(PAGE), seen)
        del start  # the mapping cannot be closed while somebody holds its address
    return failed == 0 and bool(seen[0] & 1)
