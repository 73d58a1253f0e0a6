"""Shared memory without a descriptor of its own: mmap, fallocate and madvise as the kernel offers them.

Python's own `mmap` keeps a duplicate of the descriptor open for every mapping; a rank has few to spare.
"""

import ctypes
import errno
import os
from typing import Any

_PROT_READ_WRITE, _MAP_SHARED = 3, 1
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_POPULATE_WRITE = 23
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class _Span:
    """Mapped bytes that are given back when the last view of them is gone."""

    def __del__(self) -> None:
        _libc.munmap(ctypes.addressof(self), ctypes.sizeof(self))  # type: ignore[arg-type]


def shared(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of a file, writable and shared; the view keeps the mapping alive."""
    address = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        _fail("mmap")
    span: Any = type("_Mapped", (_Span, ctypes.c_ubyte * size), {})
    return memoryview(span.from_address(address)).cast("B")


def populate(view: memoryview) -> None:
    """Enter all pages of a mapped view into the page table; older kernels do it page by page at the first use."""
    if len(view):
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        _libc.madvise(address, len(view), _POPULATE_WRITE)


def allocate(descriptor: int, size: int) -> bool:
    """Claim the space of a file's first `size` bytes; False when its file system cannot. Raises OSError (ENOSPC).

    Not `posix_fallocate`: the C library imitates that by writing, where the file system has nothing to offer.
    """
    if size and _libc.fallocate(descriptor, 0, 0, size) != 0:
        if ctypes.get_errno() in _UNSUPPORTED:
            return False
        _fail("fallocate")
    return True


def reserve(descriptor: int, size: int) -> None:
    """Make a memory of at least `size` bytes, all of them there; raises OSError when they are not to be had."""
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    allocate(descriptor, size)


def punch(descriptor: int, size: int) -> None:
    """Give the pages of the first `size` bytes back; they read as zeros from now on, and the size stays."""
    if _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, size) != 0:
        _fail("fallocate")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
