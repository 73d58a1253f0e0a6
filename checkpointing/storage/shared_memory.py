"""Shared memory without an extra descriptor per mapping, through direct calls to mmap, fallocate and madvise.

Python's own `mmap` keeps a duplicate of the descriptor open for every mapping, and a rank has few to spare.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

_PROT_READ_WRITE, _MAP_SHARED = 3, 1
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_POPULATE_WRITE, _COLLAPSE = 23, 25
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NO_RESERVE = 2, 0x10, 0x20, 0x4000
_HUGE = 2 << 20
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

PAGE = 4096
"""Page size in bytes: the alignment of arenas, of the files in them, and of direct reads and writes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class _Span:
    """Mapped bytes, which are unmapped when the last view of them is gone."""

    def __del__(self) -> None:
        _libc.munmap(ctypes.addressof(self), ctypes.sizeof(self))  # type: ignore[arg-type]


def map_shared(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of a file, writable and shared. The view keeps the mapping alive.

    The mapping starts at a multiple of a huge page, without which the kernel cannot use huge pages for it.
    """
    reserved = _mmap(None, size + _HUGE, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NO_RESERVE, -1)
    start, end = _up(reserved, _HUGE), reserved + _up(size + _HUGE, PAGE)
    address = _mmap(start, size, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, descriptor)
    if start > reserved:
        _libc.munmap(reserved, start - reserved)
    if end > start + _up(size, PAGE):
        _libc.munmap(start + _up(size, PAGE), end - start - _up(size, PAGE))
    span: Any = type("_Mapped", (_Span, ctypes.c_ubyte * size), {})
    return memoryview(span.from_address(address)).cast("B")


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        _fail("mmap")
    assert mapped is not None
    return mapped


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def whole_pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return _up(size, PAGE)


def use_huge_pages(view: memoryview, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Collapse the pages of a mapped view into huge pages; return False if unsupported or stopped by `stopped`.

    Huge pages make copies into them and direct writes from them a tenth to a third faster. The call takes seconds per
    GiB, so run it in a background thread. Other mappings of the same memory stay usable in the meantime.
    """
    if not len(view):
        return True
    start = _up(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), _HUGE)
    end = ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) + len(view)
    for address in range(start, end - _HUGE + 1, _HUGE):
        if stopped() or _libc.madvise(address, _HUGE, _COLLAPSE) != 0 and ctypes.get_errno() in _UNSUPPORTED:
            return False
    return True


def populate(view: memoryview) -> None:
    """Populate the page table for a mapped view. Older kernels do this page by page on first use."""
    if len(view):
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        _libc.madvise(address, len(view), _POPULATE_WRITE)


def allocate(descriptor: int, size: int, start: int = 0) -> bool:
    """Allocate space for `size` bytes of a file; return False if unsupported. Raises OSError (ENOSPC).

    This does not use `posix_fallocate`, which the C library emulates with writes on file systems that do not support
    it.
    """
    if size and _libc.fallocate(descriptor, 0, start, size) != 0:
        if ctypes.get_errno() in _UNSUPPORTED:
            return False
        _fail("fallocate")
    return True


def reserve(descriptor: int, size: int) -> None:
    """Grow a memory file to at least `size` allocated bytes. Raises OSError if they are unavailable."""
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    allocate(descriptor, size)


def punch_hole(descriptor: int, size: int) -> None:
    """Release the pages of the first `size` bytes.

    From then on, they read as zeros; the file's size does not change.
    """
    if _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, size) != 0:
        _fail("fallocate")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
