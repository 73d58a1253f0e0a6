"""Whether a checkpoint can be believed: COMMIT, manifest, sizes, chunk digests."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from checkpointing.commit import parse_name, read_commit
from checkpointing.digests import digest
from checkpointing.errors import ManifestError
from checkpointing.manifest import COMMIT, MANIFEST, FileEntry, Manifest, parse
from checkpointing.storage import LocalStorage, Storage

Progress = Callable[[int, int], None]

LEVELS = {0: "committed, sizes", 1: "sampled chunks", 2: "all chunks"}
_SAMPLE_ONE_IN = 16


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong, in one file; `chunk` counts from 0."""

    file: str
    chunk: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}" if self.chunk is None else f"{self.file} chunk {self.chunk}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verification found; `bytes` is what was read and compared, `seconds` the time it took."""

    ok: bool
    level: int
    bytes: int
    seconds: float
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Chunk:
    """One piece of work for a verifier."""

    file: FileEntry
    index: int

    @property
    def offset(self) -> int:
        return self.index * self.file.chunk_size

    @property
    def length(self) -> int:
        return min(self.file.chunk_size, self.file.size - self.offset)


def verify(path: Path, level: int, progress: Progress | None = None) -> Report:
    """Verify the checkpoint in the folder `path` at level 0 (committed, sizes), 1 (sampled chunks) or 2 (all)."""
    return verify_in(LocalStorage(path.parent), path.name, level, progress)


def verify_in(storage: Storage, name: str, level: int, progress: Progress | None = None) -> Report:
    """Like `verify`, on any storage; `progress` is told (bytes done, bytes in all) after every chunk."""
    if level not in LEVELS:
        raise ValueError(f"verify level {level}: must be one of {sorted(LEVELS)}")
    start = time.monotonic()
    sealed, faults = read_sealed(storage, name)
    done = 0
    if sealed is not None:
        bad = {fault.file for fault in faults}
        wanted = [chunk for chunk in _chosen(sealed, level) if chunk.file.name not in bad]
        faults += check_chunks(storage, name, wanted, progress)
        done = sum(chunk.length for chunk in wanted)
    return Report(ok=not faults, level=level, bytes=done, seconds=time.monotonic() - start, faults=tuple(faults))


def read_sealed(storage: Storage, name: str) -> tuple[Manifest | None, list[Fault]]:
    """The manifest that COMMIT vouches for, and what is wrong with files by name and size; None when unbelievable."""
    try:
        manifest = _manifest_of(storage, name)
        present = storage.list(name)
    except ManifestError as error:
        file, _, reason = str(error).partition(" ")
        return None, [Fault(file=file, chunk=None, reason=reason)]
    except OSError as error:
        return None, [Fault(file=_named(error), chunk=None, reason=f"unreadable: {error}")]
    return manifest, [fault for entry in manifest.files if (fault := _size_fault(entry, present))]


def _manifest_of(storage: Storage, name: str) -> Manifest:
    commit = read_commit(storage, name)
    with storage.open(f"{name}/{MANIFEST}") as stream:
        data = stream.read()
    if digest(data) != commit.manifest:
        raise ManifestError(f"{MANIFEST} is not the one that {COMMIT} vouches for (digest differs)")
    manifest = parse(data)
    if manifest.size != commit.size:
        raise ManifestError(f"{MANIFEST} lists {manifest.size} bytes, {COMMIT} says {commit.size}")
    parts = parse_name(name)
    if manifest.name != name or parts is None:
        raise ManifestError(f"{MANIFEST} belongs to {manifest.name}, not to this folder (renamed or copied)")
    if (parts.step, parts.attempt, parts.nonce) != (manifest.step, manifest.attempt, manifest.nonce):
        raise ManifestError(f"{MANIFEST} names another step or attempt than its folder")
    return manifest


def _named(error: OSError) -> str:
    return Path(str(error.filename)).name if error.filename else COMMIT


def _size_fault(entry: FileEntry, present: dict[str, int | None]) -> Fault | None:
    if entry.name not in present:
        return Fault(file=entry.name, chunk=None, reason="missing")
    found = present[entry.name]
    if found != entry.size:
        return Fault(file=entry.name, chunk=None, reason=f"has {found} bytes instead of {entry.size}")
    return None


def all_chunks(manifest: Manifest) -> list[Chunk]:
    """Every chunk of every file, in file order."""
    return [Chunk(entry, index) for entry in manifest.files for index in range(len(entry.chunks))]


def _chosen(manifest: Manifest, level: int) -> list[Chunk]:
    if level == 0:
        return []
    chunks = all_chunks(manifest)
    return chunks if level == 2 else _sampled(chunks, manifest.digest)


def _sampled(chunks: Sequence[Chunk], seed: str) -> list[Chunk]:
    """Both ends of every file and one chunk in sixteen; the same ones every time for the same checkpoint."""
    draw = random.Random(seed)
    return [
        chunk
        for chunk in chunks
        if chunk.index in (0, len(chunk.file.chunks) - 1) or draw.randrange(_SAMPLE_ONE_IN) == 0
    ]


def check_chunks(storage: Storage, name: str, chunks: Iterable[Chunk], progress: Progress | None = None) -> list[Fault]:
    """Read `chunks` and compare their digests; each file is opened once, a file that cannot be read is one fault."""
    by_file: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_file.setdefault(chunk.file.name, []).append(chunk)
    total = sum(chunk.length for group in by_file.values() for chunk in group)
    faults, done = [], 0
    for file, group in by_file.items():
        try:
            with storage.open(f"{name}/{file}") as stream:
                for chunk, fault in _compared(stream, group):
                    faults += [fault] if fault else []
                    done += chunk.length
                    if progress:
                        progress(done, total)
        except OSError as error:
            faults.append(Fault(file=file, chunk=None, reason=f"unreadable: {error}"))
    return faults


def _compared(stream: BinaryIO, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Fault | None]]:
    for chunk in chunks:
        stream.seek(chunk.offset)
        data = stream.read(chunk.length)
        good = len(data) == chunk.length and digest(data) == chunk.file.chunks[chunk.index]
        yield chunk, None if good else Fault(file=chunk.file.name, chunk=chunk.index, reason="digest differs")
