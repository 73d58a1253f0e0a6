"""Where the bytes of a checkpoint land: memory shaped like its files, each chunk digested by the thread that read it.

Nothing is copied on the way: a saved tensor is a view of this memory, and what was verified is what is delivered.
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

from checkpointing.errors import Refused
from checkpointing.format.read_plan import Shard
from checkpointing.storage.digests import digest
from checkpointing.storage.shared_memory import PAGE, whole_pages
from checkpointing.verification.verify import Fault

READ = 8 << 20
"""Bytes of one read call, where chunks are larger."""

Open = Callable[[str], BinaryIO]
"""Opens one of a checkpoint's files; raises OSError."""

Lend = Callable[[int], Sequence[memoryview]]
"""Lends page-aligned memory to land in, given the bytes that are wanted; what does not fit lands elsewhere."""


def threads() -> int:
    """Threads that read and digest; two keep a disk busy while one of them digests."""
    return min(2, os.cpu_count() or 1)


class ReadBuffers:
    """Memory for some chunks of some files. Chunks that follow each other in a file do so in the memory."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._flat: dict[tuple[int, torch.dtype], Tensor] = {}
        self._at: dict[int, tuple[int, int]] = {}  # chunk -> block, and what to add to a place in the file

    @classmethod
    def allocate(cls, shards: Sequence[Shard], chunks: Iterable[int], lend: Lend) -> "ReadBuffers":
        """Memory for `chunks`: what is lent as far as it reaches, else new."""
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
    def of(cls, memory: memoryview, placed: Iterable[tuple[Shard, int]]) -> "ReadBuffers":
        """Files that lie in memory already, each whole, at the places given with them."""
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
        """The bytes of one chunk, and the same up to the end of their last page."""
        block, delta = self._at[chunk]
        start, end = shard.span(chunk)
        size = end - start
        room = size if shard.chunk_size % PAGE else whole_pages(size)
        whole = self._blocks[block][start + delta : start + delta + room]
        return whole[:size], whole

    def flat(self, chunk: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, int]:
        """The memory a chunk lies in, as values, and how many bytes to add to a place in its file to find it there."""
        block, delta = self._at[chunk]
        if (block, dtype) not in self._flat:
            self._flat[block, dtype] = torch.frombuffer(self._blocks[block], dtype=dtype)
        return self._flat[block, dtype], delta

    def holds(self, chunks: range) -> bool:
        """Whether all of them are here, one behind the other."""
        if len(chunks) == 1:
            return chunks[0] in self._at
        places = {self._at.get(chunk) for chunk in chunks}
        return len(places) == 1 and None not in places


def _runs(shards: Sequence[Shard], chunks: Sequence[int]) -> Iterator[tuple[Shard, range, int]]:
    """Chunks that follow each other in one file, with the memory they take, whole pages."""
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
        memory.madvise(mmap.MADV_HUGEPAGE)  # few page faults instead of many: they cost as much as the reading
    return memoryview(memory)


class _File:
    """One file opened for several threads; cached bytes come from the page cache, others past it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        raw = getattr(stream, "raw", stream)
        self._descriptor = raw.fileno() if isinstance(raw, io.FileIO) else -1
        self._direct = self._probe = -1
        if self._descriptor >= 0:
            self._direct = _reopened(self._descriptor, os.O_DIRECT)
            self._probe = _reopened(self._descriptor, 0)
        if self._probe >= 0:
            os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)

    def fill(self, view: memoryview, room: memoryview, offset: int) -> int:
        """Read as many bytes as `view` takes, fewer at the end of the file; `room` is `view` up to a page's end."""
        if self._descriptor < 0:
            with self._lock:
                return self._stream_into(view, offset)
        done = 0
        if self._direct >= 0 and offset % PAGE == 0 and not self._cached(offset):
            done = min(self._past_the_cache(room, offset), len(view))
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done : done + READ]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _cached(self, offset: int) -> bool:
        """Whether the first page is in the page cache: then reading past it would be slower, and not spare it."""
        if self._probe < 0:
            return False
        try:
            return os.preadv(self._probe, [bytearray(PAGE)], offset, os.RWF_NOWAIT) > 0
        except OSError:
            return False

    def _past_the_cache(self, room: memoryview, offset: int) -> int:
        done = 0
        while done < len(room) and done % PAGE == 0:
            try:
                count = os.preadv(self._direct, [room[done : done + READ]], offset + done)
            except OSError:
                break  # the file system refuses it after all, or the disk has an error: the other way tells
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


def _reopened(descriptor: int, flags: int) -> int:
    """The same file, whatever its name means by now; -1 when that cannot be done."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError:
        return -1


class Reader:
    """Reads chunks of one checkpoint into read buffers and verifies them there."""

    def __init__(
        self, name: str, shards: Sequence[Shard], open_file: Open, *, patience: float = 0, pause: float = 0
    ) -> None:
        """`patience` is how long to wait for files that others have seen already, in seconds."""
        self._name, self._open_file = name, open_file
        self._patience, self._pause = patience, pause
        self._shards = {chunk: shard for shard in shards for chunk in range(shard.first, shard.first + shard.count)}
        self._files: dict[str, _File] = {}
        self._lock, self._failed = threading.Lock(), threading.Event()
        self.bytes_read = 0

    def read(self, chunks: Sequence[int], buffers: ReadBuffers) -> None:
        """Fill the buffers; raises Refused when a byte differs, OSError is told as one that differs."""
        try:
            self._verified(chunks, lambda chunk: self._read_chunk(chunk, buffers))
        finally:
            for file in self._files.values():
                file.close()

    def check(self, chunks: Sequence[int], buffers: ReadBuffers) -> None:
        """Verify what lies there already; raises Refused."""
        self._verified(chunks, lambda chunk: self._compare(chunk, buffers.memory(self._shards[chunk], chunk)[0]))

    def _verified(self, chunks: Sequence[int], act: Callable[[int], Fault | None]) -> None:
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
            raise Refused(self._name, reason, damaged, unreadable=all(fault.is_unreadable for fault in faults))

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
            return Fault.of(shard.name, error)
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
                self._files[name] = _File(self._opened(name))
            return self._files[name]

    def _opened(self, name: str) -> BinaryIO:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._open_file(name)
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(self._pause)
