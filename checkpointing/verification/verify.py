"""Verification of a checkpoint's bytes: COMMIT, manifest, sizes, chunk digests.

Files are digested by several threads. Each digests a chunk as it reads it through the page cache, in pieces that are
still in the core's own cache. Unlike with O_DIRECT, the kernel reads ahead in the meantime. Pages that were not cached
before are dropped immediately, so that verification does not evict data that training uses.
"""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkpointing.errors import ManifestError
from checkpointing.format.commit import DELETED, parse_name, read_commit
from checkpointing.format.manifest import (
    COMMIT,
    FINGERPRINTS,
    INDEX,
    MANIFEST,
    FileEntry,
    Index,
    Manifest,
    parse,
    parse_fingerprints,
    parse_index,
)
from checkpointing.storage.backends import LocalStorage, Storage
from checkpointing.storage.digests import digest
from checkpointing.storage.storage_errors import error_words

Progress = Callable[[int, int], None]
"""Function that is called with the amount done so far and the total, in bytes or items."""

LEVELS = {0: "committed, sizes", 1: "sampled chunks", 2: "all chunks"}
_SAMPLE_ONE_IN = 16
_NAMED = 2

PIECE = 512 << 10
"""Bytes per read from the page cache: half of a typical L2 cache."""
PAGE = mmap.PAGESIZE
_STRIDE = 8 << 20
_MAX_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in one file. `chunk` counts from 0, and `tensors` are the keys of the affected tensors.

    `gone` means that the file could not be opened because it does not exist.
    """

    file: str
    chunk: int | None = None
    reason: str
    tensors: tuple[str, ...] = ()
    gone: bool = False

    @classmethod
    def from_error(cls, file: str, error: OSError) -> "Fault":
        """Return the fault for a file that could not be read."""
        gone = isinstance(error, FileNotFoundError)
        return cls(file=file, reason=f"unreadable: {error_words(error)}", gone=gone)

    @property
    def tensor(self) -> str | None:
        """The affected tensors, for display: the first few, and the number of others."""
        if not self.tensors:
            return None
        more = len(self.tensors) - _NAMED
        return ", ".join(self.tensors[:_NAMED]) + (f" and {more} more" if more > 0 else "")

    @property
    def is_damage(self) -> bool:
        """Whether bytes are wrong or missing.

        A file that cannot be read now does not count, as it may be readable later.
        """
        return not self.reason.startswith("unreadable: ")

    @property
    def is_unreadable(self) -> bool:
        """Whether the file presumably exists but could not be read."""
        return not self.is_damage and not self.gone

    def __str__(self) -> str:
        place = self.file if self.chunk is None else f"{self.file} chunk {self.chunk}"
        return f"{place}: {self.reason}" + (f" ({self.tensor})" if self.tensors else "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a verification. `bytes` is the amount read and compared, `seconds` the time it took.

    `notes` lists the checks that were skipped for lack of data in the checkpoint, and NaN or infinities that may be
    legitimate.
    """

    ok: bool
    level: int
    bytes: int
    seconds: float
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A verifier's work item."""

    file: FileEntry
    index: int

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def offset(self) -> int:
        return self.index * self.file.chunk_size

    @property
    def length(self) -> int:
        return min(self.file.chunk_size, self.file.size - self.offset)


def verify(path: Path, level: int, progress: Progress | None = None) -> Report:
    """Verify the checkpoint in the folder `path` at level 0 (committed, sizes), 1 (sampled chunks) or 2 (all)."""
    return verify_checkpoint(LocalStorage(path.parent), path.name, level, progress)


def verify_checkpoint(
    storage: Storage, name: str, level: int, progress: Progress | None = None, before: "PageCacheState | None" = None,
    choose: Callable[[Sequence[Chunk]], Sequence[Chunk]] | None = None,
) -> Report:  # fmt: skip
    """Verify as `verify` does, on any storage. `progress` is called with (bytes done, total bytes) after every chunk.

    `before` records what was in the page cache and may keep the pages that are read there for a second pass. If several
    readers share the work, `choose` selects the chunks to read here.
    """
    if level not in LEVELS:
        raise ValueError(f"verify level {level}: must be one of {sorted(LEVELS)}")
    start = time.monotonic()
    sealed, faults = read_sealed(storage, name)
    done = 0
    if sealed is not None:
        bad = {fault.file for fault in faults}
        wanted = [chunk for chunk in _choose_chunks(sealed, level) if chunk.file.name not in bad]
        wanted = list(choose(wanted)) if choose else wanted
        faults = add_tensor_names(storage, sealed, faults + check_chunks(storage, name, wanted, progress, before))
        done = sum(chunk.length for chunk in wanted)
    return Report(ok=not faults, level=level, bytes=done, seconds=time.monotonic() - start, faults=tuple(faults))


def read_sealed(storage: Storage, name: str) -> tuple[Manifest | None, list[Fault]]:
    """Return the manifest (None if it is invalid or does not match COMMIT) and the faults in files' names and sizes."""
    try:
        manifest = _read_manifest(storage, name)
        present = storage.list(name)
    except ManifestError as error:
        file, _, reason = str(error).partition(" ")
        return None, [Fault(file=file, reason=reason)]
    except OSError as error:
        return None, [Fault.from_error(_file_name(error), error)]
    gone = [Fault(file=DELETED, reason="its deletion has begun")] if DELETED in present else []
    return manifest, gone + [fault for entry in manifest.files if (fault := _size_fault(entry, present))]


def _read_manifest(storage: Storage, name: str) -> Manifest:
    commit = read_commit(storage, name)
    with storage.open(f"{name}/{MANIFEST}") as stream:
        data = stream.read()
    if digest(data) != commit.manifest:
        raise ManifestError(f"{MANIFEST} does not match the digest in {COMMIT}")
    manifest = parse(data)
    if manifest.size != commit.size:
        raise ManifestError(f"{MANIFEST} lists {manifest.size} bytes, {COMMIT} records {commit.size}")
    parts = parse_name(name)
    if manifest.name != name or parts is None:
        raise ManifestError(f"{MANIFEST} belongs to {manifest.name}, not to this folder (renamed or copied)")
    if (parts.step, parts.attempt, parts.nonce) != (manifest.step, manifest.attempt, manifest.nonce):
        raise ManifestError(f"{MANIFEST} names a different step or attempt than its folder")
    return manifest


def _file_name(error: OSError) -> str:
    return Path(str(error.filename)).name if error.filename else COMMIT


def _size_fault(entry: FileEntry, present: dict[str, int | None]) -> Fault | None:
    if entry.name not in present:
        return Fault(file=entry.name, reason="missing")
    found = present[entry.name]
    if found is None:
        return Fault(file=entry.name, reason="is a folder, not a file")
    if found != entry.size:
        return Fault(file=entry.name, reason=f"has {found} bytes instead of {entry.size}")
    return None


def all_chunks(manifest: Manifest) -> list[Chunk]:
    """Return every chunk of every file, in file order."""
    return [Chunk(entry, index) for entry in manifest.files for index in range(len(entry.chunks))]


def _choose_chunks(manifest: Manifest, level: int) -> list[Chunk]:
    """Return none of the chunks, a sample or all of them. A checkpoint's sample is always the same."""
    chunks = all_chunks(manifest) if level else []
    if level != 1:
        return chunks
    draw = random.Random(manifest.digest)
    ends = [chunk.index in (0, len(chunk.file.chunks) - 1) for chunk in chunks]
    return [chunk for chunk, is_end in zip(chunks, ends, strict=True) if is_end or draw.randrange(_SAMPLE_ONE_IN) == 0]


def check_chunks(
    storage: Storage, name: str, chunks: Sequence[Chunk], progress: Progress | None = None,
    before: "PageCacheState | None" = None,
) -> list[Fault]:  # fmt: skip
    """Read `chunks`, several at a time, and compare their digests. Faults are in the order of the chunks.

    If `before.keeps` is set, the pages read stay in the page cache until `before.drop_new_pages` is called.
    """
    order = {(chunk.name, chunk.index): at for at, chunk in enumerate(chunks)}
    faults: dict[int, Fault] = {}
    left, lock, stopped = iter(chunks), threading.Lock(), threading.Event()
    cache = before or PageCacheState()
    total, done = sum(chunk.length for chunk in chunks), 0

    def work() -> None:
        nonlocal done
        with closing(_make_digester(storage, name, cache)) as digester:
            while not stopped.is_set():
                with lock:
                    chunk = next(left, None)
                if chunk is None:
                    return
                fault = _check_chunk(digester, chunk)
                with lock:
                    if fault is not None:
                        faults[order[chunk.name, chunk.index]] = fault
                    done += chunk.length
                    if progress:
                        progress(done, total)

    count = max(1, min(reader_threads(), len(chunks)))
    with ThreadPoolExecutor(count, thread_name_prefix="verify") as pool:
        futures = [pool.submit(work) for _ in range(count)]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()  # an interrupted scan ends once the chunks being read are done
    return [faults[at] for at in sorted(faults)]


def reader_threads() -> int:
    """Return the thread count: at least two, so that one reads while the other digests. Four saturate a process."""
    return min(_MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


def _make_digester(storage: Storage, folder: str, before: "PageCacheState") -> "_LocalDigester | _StreamDigester":
    # A storage that overrides `open` is read through its own streams.
    if isinstance(storage, LocalStorage) and type(storage).open is LocalStorage.open:
        return _LocalDigester(storage.root / folder, before)
    return _StreamDigester(storage, folder)


def _check_chunk(digester: "_LocalDigester | _StreamDigester", chunk: Chunk) -> Fault | None:
    try:
        reason = "" if digester.digest(chunk) == chunk.file.chunks[chunk.index] else "digest differs"
    except OSError as error:
        reason = f"unreadable: {error}"
    return Fault(file=chunk.name, chunk=chunk.index, reason=reason) if reason else None


def read_listed(storage: Storage, manifest: Manifest, file: str) -> bytes:
    """Return the verified bytes of a small file that the manifest lists. Raises ManifestError or OSError."""
    entry = manifest.file(file)
    if entry is None:
        raise ManifestError(f"{file} is not listed in {MANIFEST}")
    with storage.open(f"{manifest.name}/{file}") as stream:
        data = stream.read()
    if FileEntry.from_bytes(file, data, entry.chunk_size) != entry:
        raise ManifestError(f"{file} does not match its digest")
    return data


def read_fingerprints(storage: Storage, manifest: Manifest) -> dict[str, str] | None:
    """Return the fingerprints taken at save time, by key; None if there are none. Raises ManifestError or OSError."""
    if manifest.file(FINGERPRINTS) is None:
        return None
    return parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS))


def add_tensor_names(storage: Storage, manifest: Manifest, faults: list[Fault]) -> list[Fault]:
    """Add the affected tensors to the faults if the checkpoint's index can still be trusted."""
    if not faults:
        return faults
    try:
        index = parse_index(read_listed(storage, manifest, INDEX))
    except (ManifestError, OSError):
        return faults
    places = {entry.name: entry for entry in manifest.files}
    return [replace(fault, tensors=_affected_tensors(index, places, fault)) for fault in faults]


def _affected_tensors(index: Index, places: Mapping[str, FileEntry], fault: Fault) -> tuple[str, ...]:
    entry = places.get(fault.file)
    if entry is None:
        return fault.tensors
    start = 0 if fault.chunk is None else fault.chunk * entry.chunk_size
    end = entry.size if fault.chunk is None else start + entry.chunk_size
    hit = (p for p in index.pieces if p.file == fault.file and p.start < end and p.start + p.length > start)
    return tuple(dict.fromkeys(piece.key for piece in hit))


class _StreamDigester:
    """Digester that reads through a storage's own streams."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._name = ""
        self._stream: BinaryIO | None = None

    def digest(self, chunk: Chunk) -> str:
        if self._name != chunk.name or self._stream is None:
            self.close()
            self._stream = self._storage.open(f"{self._folder}/{chunk.name}")
            self._name = chunk.name
        self._stream.seek(chunk.offset)
        return xxhash.xxh3_128_hexdigest(self._stream.read(chunk.length))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class PageCacheState:
    """The pages that were cached before a scan.

    The scan's threads share this state, because they also share the kernel's read-ahead. Pages that were not cached are
    dropped immediately, unless `keeps` is set for a second pass.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self._lock = threading.Lock()
        self._files: dict[str, list[bool]] = {}

    def cached_ranges(self, name: str, descriptor: int) -> list[bool]:
        """Return, for each 8 MiB of a file, whether it was cached, judging by the page in its middle."""
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

    def digest(self, chunk: Chunk) -> str:
        if self._name != chunk.name:
            self._open(chunk.name)
        found = self._read(chunk)
        if not self._before.keeps and not self._was_warm(chunk):
            os.posix_fadvise(self._descriptor, chunk.offset, chunk.length, os.POSIX_FADV_DONTNEED)
        return found

    def _read(self, chunk: Chunk) -> str:
        done, digest = 0, xxhash.xxh3_128()
        while done < chunk.length:
            wanted = self._piece[: min(PIECE, chunk.length - done)]
            count = os.preadv(self._descriptor, [wanted], chunk.offset + done)
            if count == 0:
                break
            digest.update(self._piece[:count])
            done += count
        return digest.hexdigest()

    def _was_warm(self, chunk: Chunk) -> bool:
        return any(self._warm[chunk.offset // _STRIDE : -(-(chunk.offset + chunk.length) // _STRIDE)])

    def _open(self, name: str) -> None:
        self.close()
        self._descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        self._name, self._warm = name, self._before.cached_ranges(name, self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            # Also drop what the kernel has read ahead beyond the last chunk.
            if not self._before.keeps and not any(self._warm):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._descriptor)
        self._name, self._descriptor = "", -1


_LIBC = ctypes.CDLL(None, use_errno=True)


def _resident(descriptor: int, offset: int) -> bool:
    """Return whether the file's page at `offset` is in the page cache, without loading it."""
    try:
        # A writable private mapping, because ctypes gives the address of writable mappings only. Nothing is written to
        # it.
        mapped = mmap.mmap(descriptor, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    except ValueError:
        return False  # the file ends before this offset
    with mapped as page:
        start = ctypes.c_char.from_buffer(page)
        seen = (ctypes.c_ubyte * 1)()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(PAGE), seen)
        del start  # the mapping cannot be closed while its address is referenced
    return failed == 0 and bool(seen[0] & 1)
