"""Direct writes (O_DIRECT) of new files in large blocks, with a fallback to the page cache."""

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

from checkpointing.storage import shared_memory

BLOCK = 16 << 20

_THREADS = 4
_SMALL = 64 << 20  # up to this size, a second thread costs more than it saves

Cancelled = Callable[[], bool]


def write_direct(
    path: Path, data: memoryview, *, block: int = BLOCK, cancelled: Cancelled = lambda: False, threads: int = 0,
    at: int | None = None,
) -> bool:  # fmt: skip
    """Write a new file and make its bytes durable. Its name becomes durable only with an fsync of the folder.

    With `at`, a multiple of 4096, the data fills a region of a file that others also write. Returns True if no byte
    passed through the page cache; for that, `data` must start at a page boundary and its length must be a multiple of
    4096. Raises OSError: FileExistsError for an existing name, ENOSPC before any write if the file system supports
    allocation, ECANCELED if `cancelled` becomes true between two blocks. The data written so far is left in place.
    """
    alone = os.O_EXCL if at is None else 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | alone | os.O_CLOEXEC, 0o600)
    try:
        shared_memory.allocate(descriptor, len(data), at or 0)
        file = _DirectFile(descriptor, data, at or 0, block, cancelled)
        file.write_all(threads or (_THREADS if len(data) > _SMALL else 1))
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    finally:
        os.close(descriptor)
    return file.direct


class _DirectFile:
    """An open file into which one or more threads write the blocks of one buffer, starting at offset `begin`."""

    def __init__(self, descriptor: int, data: memoryview, begin: int, block: int, cancelled: Cancelled) -> None:
        self._descriptor, self._data, self._begin = descriptor, data, begin
        self._block, self._cancelled = block, cancelled
        self._starts = itertools.count(0, block)
        self._error: OSError | None = None
        self._written: list[int] = []
        # Set after opening, because an open that fails due to the flag may leave the file behind.
        self.direct = self._switch(direct=True)

    def _switch(self, *, direct: bool) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return direct

    def write_all(self, threads: int) -> None:
        """Write everything. Once all threads have stopped, raise the first OSError that any of them met."""
        others = [threading.Thread(target=self._write_blocks, name=f"lane-{number}") for number in range(1, threads)]
        for other in others:
            other.start()
        self._write_blocks()
        for other in others:
            other.join()
        if self._error is not None:
            raise self._error
        # A thread that died from another error, such as low memory, leaves zeros in place of its block.
        if sum(self._written) != len(self._data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _write_blocks(self) -> None:
        try:
            # `next` on a count is atomic, so every block is taken exactly once, in order.
            while self._error is None and (start := next(self._starts)) < len(self._data):
                if self._cancelled():
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                self._write(start, min(start + self._block, len(self._data)))
        except OSError as error:
            self._error = self._error or error

    def _write(self, at: int, end: int) -> None:
        while at < end:
            direct = self.direct
            try:
                count = os.pwrite(self._descriptor, self._data[at:end], self._begin + at)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                # This file system needs a different alignment or rejects direct I/O. The page cache accepts any
                # alignment.
                self.direct = self._switch(direct=False)
                continue
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._written.append(count)
            at += count
