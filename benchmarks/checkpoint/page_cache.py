"""Files whose bytes are not in the page cache, and the proof of it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_MOST_LEFT = 0.01


def drop(files: Iterable[Path]) -> None:
    """Take `files` out of the page cache; raises RuntimeError when the kernel kept more than a hundredth."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left = resident(descriptor)
        finally:
            os.close(descriptor)
        if left > _MOST_LEFT:
            raise RuntimeError(f"{path} stays in the page cache ({left:.0%}): a cold number cannot be taken here")


def warm(files: Iterable[Path]) -> None:
    """Read `files` once, so that they are in the page cache."""
    block = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def resident(descriptor: int) -> float:
    """The share of a file's pages that the page cache holds."""
    size = os.fstat(descriptor).st_size
    if size < mmap.PAGESIZE:
        return 0.0  # a file of less than a page tells nothing
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found
        )
        del first
        if status:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in found) / pages
