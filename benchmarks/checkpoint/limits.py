"""The machine's limits: copies, writes and reads of bytes without overhead."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoint.states import LIMIT, drop
from checkpointing.storage import shared_memory

BLOCK = 8 << 20
"""Bytes of one write or read, as in the engine's chunks."""

CORES = len(os.sched_getaffinity(0))


def room(nbytes: int, *, shared: bool = False) -> memoryview:
    """Return page-aligned memory with resident pages; `shared` makes it like the engine's arena: memfd, huge pages."""
    if not shared:
        view = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    else:
        descriptor = os.memfd_create("limit")
        os.ftruncate(descriptor, nbytes)
        view = shared_memory.map_shared(descriptor, nbytes)
        os.close(descriptor)
        shared_memory.populate(view)
        shared_memory.use_huge_pages(view)
    for start in range(0, nbytes, BLOCK):
        # Random, because some disks and file systems treat zeros and repetitions differently.
        view[start : start + BLOCK] = os.urandom(len(view[start : start + BLOCK]))
    return view


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def in_threads(threads: int, act: Callable[[int], None]) -> float:
    """Return the seconds until `act(0)` to `act(threads - 1)` are done, each in a thread that was waiting before."""
    gate = threading.Barrier(threads + 1)

    def body(number: int) -> None:
        gate.wait()
        act(number)

    if threads == 1:
        start = time.perf_counter()
        act(0)
        return time.perf_counter() - start
    workers = [threading.Thread(target=body, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def memcpy(source: memoryview, target: memoryview) -> float:
    """Return the seconds of one memcpy in this thread; ctypes releases the GIL meanwhile."""
    there, here, size = address(target), address(source), len(source)
    start = time.perf_counter()
    ctypes.memmove(there, here, size)
    return time.perf_counter() - start


def raw_write(view: memoryview, folder: Path, *, threads: int = 1) -> float:
    """Return the seconds to write `view` to a new file and wait for the disk, with O_DIRECT if supported."""
    path = folder / "raw-write"
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, len(view))
        in_threads(threads, lambda number: _write(descriptor, view, number, threads))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _fsync_dir(folder)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _write(descriptor: int, view: memoryview, number: int, threads: int) -> None:
    for at in range(number * BLOCK, len(view), threads * BLOCK):
        _whole(os.pwrite(descriptor, view[at : at + BLOCK], at), len(view[at : at + BLOCK]))


def raw_reads(files: list[Path], target: memoryview, *, cold: bool) -> dict[str, Callable[[], float]]:
    """Return the ways of reading at the limit: warm through the page cache, cold also with O_DIRECT."""
    ways = {LIMIT: lambda: raw_read(files, target, threads=CORES, cold=cold)}
    if cold:
        ways[f"{LIMIT}, O_DIRECT"] = lambda: raw_read(files, target, threads=CORES, cold=cold, direct=True)
    return ways


def raw_read(files: list[Path], target: memoryview, *, threads: int, cold: bool, direct: bool = False) -> float:
    """Return the seconds to read `files` one after the other into `target`, with `threads` threads.

    `target` may be smaller than the files; it is then refilled repeatedly, like a verifier's memory.
    """
    if cold:
        drop(files)
    pieces, filled = [], 0
    for path in files:
        size = path.stat().st_size
        for at in range(0, size, BLOCK):
            if filled + BLOCK > len(target):
                filled = 0
            pieces.append((path, at, filled))
            filled += BLOCK
    start = time.perf_counter()
    opened = {path: _open(path, os.O_RDONLY, direct=direct) for path in files}
    try:
        in_threads(threads, lambda number: _read(pieces[number::threads], opened, target, number, threads))
        return time.perf_counter() - start
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _read(
    pieces: list[tuple[Path, int, int]], opened: dict[Path, int], target: memoryview, number: int, threads: int
) -> None:
    for path, at, place in pieces:
        # A small target is partitioned, so that two threads never fill the same block.
        place = place if len(target) > threads * BLOCK else number * BLOCK
        os.preadv(opened[path], [target[place : place + BLOCK]], at)


def _open(path: Path, flags: int, *, direct: bool = True) -> int:
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            path.unlink(missing_ok=True) if flags & os.O_CREAT else None
    return os.open(path, flags, 0o600)


def _whole(done: int, asked: int) -> None:
    if done != asked:
        raise OSError(f"{done} of {asked} bytes were written")


def _fsync_dir(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
