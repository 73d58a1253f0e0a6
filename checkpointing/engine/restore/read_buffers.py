"""Read buffers: memory laid out like a checkpoint's files. Each chunk is digested by the thread that read it.

Nothing is copied in between. A saved tensor is a view of this memory, so the bytes delivered are those that were
verified.
"""

import contextlib
import io
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import torch
from torch import Tensor

from checkpointing.errors import CheckpointRefused
from checkpointing.format.read_plan import Shard
from checkpointing.storage.digests import digest
from checkpointing.storage.shared_memory import PAGE, whole_pages
from checkpointing.verification.verify import Fault

READ = 8 << 20
"""Maximum bytes per read call."""

Open = Callable[[str], BinaryIO]
"""Function that opens one of a checkpoint's files. Raises OSError."""

Lend = Callable[[int], Sequence[memoryview]]
"""Function that lends page-aligned memory for a given number of bytes. It may lend less."""


def threads() -> int:
    """Return the number of reading threads. Two keep a disk busy: one reads while the other digests."""
    return min(2, os.cpu_count() or 1)


class ReadBuffers:
    """Memory for some chunks of some files; adjacent chunks of a file are adjacent in memory."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._flat: dict[tuple[int, torch.dtype], Tensor] = {}
        self._at: dict[int, tuple[int, int]] = {}  # chunk -> (block, number to add to a file offset)

    @classmethod
    def allocate(cls, shards: Sequence[Shard], chunks: Iterable[int], lend: Lend) -> "ReadBuffers":
        """Allocate memory for `chunks`: lent memory first, then new memory."""
        buffers = cls()
        runs = sorted(_runs(shards, sorted(chunks)), key=lambda run: -run[2])
        rooms = list(lend(sum(size for *_, size in runs))) if runs else []
        blocks = [(buffers._add(room), len(room)) for room in rooms]
        free = [0] * len(rooms)
        late: list[tuple[Shard, range, int]] = []
        for shard, numbers, size in runs:
            at = next((at for at, (_, length) in enumerate(blocks) if free[at] + size <= length), None)
            if at is None:
                late.append((shard, numbers, size))
                continue
            buffers._put(shard, numbers, blocks[at][0], free[at])
            free[at] += size
        if late:
            block, start = buffers._add(_fresh(sum(size for *_, size in late))), 0
            for shard, numbers, size in late:
                buffers._put(shard, numbers, block, start)
                start += size
        return buffers

    @classmethod
    def from_memory(cls, memory: memoryview, placed: Iterable[tuple[Shard, int]]) -> "ReadBuffers":
        """Wrap complete files that are already in memory at the given offsets."""
        buffers = cls()
        block = buffers._add(memory)
        for shard, place in placed:
            buffers._put(shard, range(shard.first, shard.first + shard.count), block, place)
        return buffers

    def _add(self, block: memoryview) -> int:
        self._blocks.append(block)
        return len(self._blocks) - 1

    def _put(self, shard: Shard, chunks: range, block: int, start: int) -> None:
        delta = start - shard.span(chunks[0])[0]
        for chunk in chunks:
            self._at[chunk] = (block, delta)

    def memory(self, shard: Shard, chunk: int) -> tuple[memoryview, memoryview]:
        """Return the bytes of one chunk, and the same range extended to the end of its last page."""
        block, delta = self._at[chunk]
        start, end = shard.span(chunk)
        size = end - start
        room = size if shard.chunk_size % PAGE else whole_pages(size)
        whole = self._blocks[block][start + delta : start + delta + room]
        return whole[:size], whole

    def flat(self, chunk: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, int]:
        """Return a chunk's block as values, and what to add to a file offset to get the offset in the block."""
        block, delta = self._at[chunk]
        if (block, dtype) not in self._flat:
            self._flat[block, dtype] = torch.frombuffer(self._blocks[block], dtype=dtype)
        return self._flat[block, dtype], delta

    def holds(self, chunks: range) -> bool:
        """Return whether all these chunks are in the buffers and contiguous."""
        if len(chunks) == 1:
            return chunks[0] in self._at
        places = {self._at.get(chunk) for chunk in chunks}
        return len(places) == 1 and None not in places


def _runs(shards: Sequence[Shard], chunks: Sequence[int]) -> Iterator[tuple[Shard, range, int]]:
    """Yield runs of adjacent chunks in one file, with their memory size in whole pages."""
    wanted = iter(chunks)
    chunk = next(wanted, None)
    for shard in shards:
        end = shard.first + shard.count
        while chunk is not None and chunk < end:
            first = last = chunk
            while (chunk := next(wanted, None)) == last + 1 and chunk < end:
                last = chunk
            size = shard.span(last)[1] - shard.span(first)[0]
            yield shard, range(first, last + 1), whole_pages(size)


def _fresh(size: int) -> memoryview:
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, which cost as much as the reads themselves
    return memoryview(memory)


class _File:
    """A file opened for use by several threads. Cached bytes are read from the page cache, others with direct I/O."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        raw = getattr(stream, "raw", stream)
        self._descriptor = raw.fileno() if isinstance(raw, io.FileIO) else -1
        self._direct = self._probe = -1
        if self._descriptor >= 0:
            self._direct = _reopen(self._descriptor, os.O_DIRECT)
            self._probe = _reopen(self._descriptor, 0)
        if self._probe >= 0:
            os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)

    def fill(self, view: memoryview, room: memoryview, offset: int) -> int:
        """Fill `view`; return the number of bytes read, fewer at the end of the file.

        `room` is `view` extended to a page's end.
        """
        if self._descriptor < 0:
            with self._lock:
                return self._stream_into(view, offset)
        done = 0
        if self._direct >= 0 and offset % PAGE == 0 and not self._is_cached(offset):
            done = min(self._read_directly(room, offset), len(view))
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done : done + READ]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _is_cached(self, offset: int) -> bool:
        """Return whether the first page is cached.

        If it is, direct I/O would be slower and would not spare the page cache.
        """
        if self._probe < 0:
            return False
        try:
            return os.preadv(self._probe, [bytearray(PAGE)], offset, os.RWF_NOWAIT) > 0
        except OSError:
            return False

    def _read_directly(self, room: memoryview, offset: int) -> int:
        done = 0
        while done < len(room) and done % PAGE == 0:
            try:
                count = os.preadv(self._direct, [room[done : done + READ]], offset + done)
            except OSError:
                break  # refused by the file system, or a disk error, which the buffered read then reports
            if count == 0:
                break
            done += count
        return done

    def _stream_into(self, view: memoryview, offset: int) -> int:
        self._stream.seek(offset)
        done = 0
        while done < len(view):
            data = self._stream.read(min(READ, len(view) - done))
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._stream.close()
        for descriptor in (self._direct, self._probe):
            if descriptor >= 0:
                os.close(descriptor)


def _reopen(descriptor: int, flags: int) -> int:
    """Reopen the same file, even if it was renamed; return -1 on failure."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError:
        return -1


class ChunkReader:
    """Reads a checkpoint's chunks into read buffers and verifies them there."""

    def __init__(
        self, name: str, shards: Sequence[Shard], open_file: Open, *, patience: float = 0, pause: float = 0
    ) -> None:
        """Create a reader; `patience` is how many seconds to wait for files that other ranks have seen."""
        self._name, self._open_file = name, open_file
        self._patience, self._pause = patience, pause
        self._shards = {chunk: shard for shard in shards for chunk in range(shard.first, shard.first + shard.count)}
        self._files: dict[str, _File] = {}
        self._lock, self._failed = threading.Lock(), threading.Event()
        self.bytes_read = 0

    def read(self, chunks: Sequence[int], buffers: ReadBuffers) -> None:
        """Fill the buffers. Raises CheckpointRefused if a byte differs or a file cannot be read."""
        try:
            self._verify_chunks(chunks, lambda chunk: self._read_chunk(chunk, buffers))
        finally:
            for file in self._files.values():
                file.close()

    def check(self, chunks: Sequence[int], buffers: ReadBuffers) -> None:
        """Verify data already in the buffers. Raises CheckpointRefused."""
        self._verify_chunks(chunks, lambda chunk: self._compare(chunk, buffers.memory(self._shards[chunk], chunk)[0]))

    def _verify_chunks(self, chunks: Sequence[int], act: Callable[[int], Fault | None]) -> None:
        queue = iter(chunks)
        count = min(threads(), len(chunks))
        if count <= 1:
            faults = self._work(queue, act)
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="checkpoint-reader") as pool:
                found = [pool.submit(self._work, queue, act) for _ in range(count)]
                faults = list(itertools.chain.from_iterable(each.result() for each in found))
        if faults:
            damaged = any(fault.is_damage for fault in faults)
            reason = "; ".join(sorted(str(fault) for fault in faults))
            raise CheckpointRefused(
                self._name, reason, damaged, unreadable=all(fault.is_unreadable for fault in faults)
            )

    def _work(self, queue: Iterator[int], act: Callable[[int], Fault | None]) -> list[Fault]:
        for chunk in queue:
            if self._failed.is_set():
                break
            fault = act(chunk)
            if fault is not None:
                self._failed.set()
                return [fault]
        return []

    def _read_chunk(self, chunk: int, buffers: ReadBuffers) -> Fault | None:
        shard = self._shards[chunk]
        view, room = buffers.memory(shard, chunk)
        try:
            count = self._file(shard.name).fill(view, room, shard.span(chunk)[0])
        except OSError as error:
            return Fault.from_error(shard.name, error)
        with self._lock:
            self.bytes_read += count
        if count < len(view):
            return Fault(file=shard.name, chunk=chunk - shard.first, reason="ends too early")
        return self._compare(chunk, view)

    def _compare(self, chunk: int, view: memoryview) -> Fault | None:
        shard = self._shards[chunk]
        if shard.digests is None or digest(view) == shard.digests[chunk - shard.first]:
            return None
        return Fault(file=shard.name, chunk=chunk - shard.first, reason="digest differs")

    def _file(self, name: str) -> _File:
        with self._lock:
            if name not in self._files:
                self._files[name] = _File(self._open_with_retry(name))
            return self._files[name]

    def _open_with_retry(self, name: str) -> BinaryIO:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._open_file(name)
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(self._pause)
