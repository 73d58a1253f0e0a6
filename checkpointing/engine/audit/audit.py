"""Verification levels 3 and 4: a checkpoint's structure and values."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.restore.metadata_reader import (
    VerifiedFile,
    index_from_metadata,
    read_index,
    read_metadata,
)
from checkpointing.engine.restore.source import parse_dtype
from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.errors import CheckpointRefused, ManifestError
from checkpointing.format.manifest import (
    COMMIT,
    FINGERPRINTS,
    INDEX,
    MANIFEST,
    METADATA,
    FileEntry,
    Index,
    Manifest,
    Piece,
    TensorInfo,
)
from checkpointing.format.read_plan import Box, overlaps
from checkpointing.format.torch_record import ReadAt, read_record
from checkpointing.storage.backends import LocalStorage, Storage
from checkpointing.verification.verify import (
    Chunk,
    Fault,
    PageCacheState,
    Progress,
    Report,
    read_fingerprints,
    read_sealed,
    verify_checkpoint,
)

ChooseFiles = Callable[[Sequence[str], Manifest], Sequence[str]]


def strays(storage: Storage, manifest: Manifest) -> list[Fault]:
    """Return a fault for each file in the folder that the manifest does not list."""
    known = {COMMIT, MANIFEST, *(entry.name for entry in manifest.files)}
    found = sorted(set(storage.list(manifest.name)) - known)
    return [Fault(file=name, reason=f"is not listed in {MANIFEST}") for name in found]


def structure_faults(
    storage: Storage, manifest: Manifest, choose_files: ChooseFiles | None = None
) -> tuple[Index | None, list[Fault]]:
    """Return a checkpoint's index (None if it is damaged) and the faults in its structure.

    `choose_files` selects the files whose records this reader checks.
    """
    faults = strays(storage, manifest)
    try:
        index = read_index(storage, manifest)
    except CheckpointRefused as refusal:
        return None, [*faults, Fault(file=INDEX, reason=refusal.reason)]
    try:
        faults += disagreements(index, read_metadata(storage, manifest))
    except CheckpointRefused as refusal:
        faults.append(Fault(file=METADATA, reason=refusal.reason))
    faults += cover_faults(index)
    outside = list(_outside(index, {entry.name: entry for entry in manifest.files}))
    faults += outside
    if not outside:
        faults += record_faults(storage, manifest, index, choose_files)
    return index, faults


def disagreements(index: Index, metadata: Metadata) -> list[Fault]:
    """Return the differences between `.metadata`, which plain DCP reads, and the index, which orch reads."""
    theirs = index_from_metadata(metadata)
    foreign = [key for key in metadata.state_dict_metadata if key not in theirs.tensors]
    faults = [_metadata_fault(key, "is not a tensor in it") for key in foreign]
    for key in sorted(theirs.tensors.keys() | index.tensors.keys()):
        there, here = theirs.tensors.get(key), index.tensors.get(key)
        if there != here:
            faults.append(_metadata_fault(key, f"is {_kind(there)} in it, {_kind(here)} in {INDEX}"))
    places, ours = _places(theirs), _places(index)
    for place in sorted(places.keys() | ours.keys()):
        if places.get(place) != ours.get(place):
            faults.append(
                _metadata_fault(place[0], f"has its shard at {place[1]} in a different place than in {INDEX}")
            )
    return faults


def _places(index: Index) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int, tuple[int, ...]]]:
    return {(piece.key, piece.offsets): (piece.file, piece.start, piece.length, piece.sizes) for piece in index.pieces}


def _metadata_fault(key: str, what: str) -> Fault:
    return Fault(file=METADATA, reason=f"{key} {what}", tensors=(key,))


def _kind(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {info.shape}"


def cover_faults(index: Index) -> list[Fault]:
    """Return faults for gaps, overlaps and wrong sizes: every value must be in exactly one piece."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in index.pieces:
        pieces[piece.key].append(piece)
    faults = []
    for key, info in sorted(index.tensors.items()):
        reason = _cover(info, pieces[key])
        if reason:
            file = pieces[key][0].file if pieces[key] else INDEX
            faults.append(Fault(file=file, reason=reason, tensors=(key,)))
    return faults


def _cover(info: TensorInfo, pieces: Sequence[Piece]) -> str:
    dtype = parse_dtype(info.dtype)
    if dtype is None:
        return f"unknown dtype {info.dtype}"
    for piece in pieces:
        if piece.nbytes != math.prod(piece.sizes) * dtype.itemsize:
            return f"the shard at {piece.offsets} has {piece.nbytes} bytes for {piece.sizes} of {info.dtype}"
    clash = next(overlaps(Box(piece.offsets, piece.sizes) for piece in pieces), None)
    if clash:
        return f"the shards at {clash[0].offsets} and {clash[1].offsets} overlap"
    held, wanted = sum(math.prod(piece.sizes) for piece in pieces), math.prod(info.shape)
    return "" if held == wanted else f"its shards hold {held} of {wanted} values"


def _outside(index: Index, files: Mapping[str, FileEntry]) -> Iterator[Fault]:
    """Yield faults for records that overlap, run past the end of their file, or are in an unlisted file."""
    for file, pieces in _by_file(index.pieces).items():
        entry = files.get(file)
        if entry is None:
            keys = tuple(dict.fromkeys(piece.key for piece in pieces))
            yield Fault(file=file, reason=f"is not listed in {MANIFEST}, but holds shards", tensors=keys)
            continue
        for piece, following in pairwise([*pieces, None]):
            assert piece is not None
            end = entry.size if following is None else following.start
            if piece.start + piece.length > end:
                what = f"the file ends at {entry.size}" if following is None else f"another shard begins at {end}"
                reason = f"a shard occupies bytes {piece.start} to {piece.start + piece.length}, but {what}"
                yield Fault(file=file, reason=reason, tensors=(piece.key,))


def record_faults(
    storage: Storage, manifest: Manifest, index: Index, choose_files: ChooseFiles | None = None
) -> list[Fault]:
    """Return faults for records that contradict the index, because plain `torch.load` reads the records instead."""
    faults = []
    by_file = _by_file(index.pieces)
    for file in choose_files(list(by_file), manifest) if choose_files else by_file:
        pieces, entry = by_file[file], manifest.file(file)
        assert entry is not None
        with storage.open(f"{manifest.name}/{file}") as stream:
            # Reads whole chunks: a record needs many small reads, each of which would be a request to remote storage.
            verified = VerifiedFile(stream, entry, manifest.name)
            for piece in pieces:
                reason = _record_reason(verified.read, piece, index.tensors[piece.key])
                if reason:
                    chunk = piece.start // entry.chunk_size
                    faults.append(Fault(file=file, chunk=chunk, reason=reason, tensors=(piece.key,)))
    return faults


def _record_reason(read: ReadAt, piece: Piece, info: TensorInfo) -> str:
    try:
        record = read_record(read, piece.start, piece.length)
    except ValueError as error:
        return f"no complete frame at {piece.start}: {error}"
    found = (record.dtype, record.shape, piece.start + record.data, record.nbytes)
    wanted = (info.dtype, piece.sizes, piece.data, piece.nbytes)
    return "" if found == wanted else f"the frame at {piece.start} contains {found}, but the index lists {wanted}"


def _by_file(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    files: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
        files.setdefault(piece.file, []).append(piece)
    return files


T = TypeVar("T")
AUDITS = {3: "structure", 4: "every value"}


@dataclass(frozen=True, kw_only=True)
class TensorExpectations:
    """The owner's expectations about a checkpoint's tensors, beyond their bytes."""

    required: tuple[str, ...] = ()
    """Tensors that must exist."""

    readable: Mapping[str, Callable[[str, Tensor], str]] = field(default_factory=dict)
    """For each key prefix, a function that returns the fault in a key's tensor, or an empty string."""

    trained: Callable[[Index], Collection[str]] = lambda index: ()
    """Keys whose values must not be NaN. Infinities are legal everywhere: masks contain them."""


@dataclass(frozen=True)
class AuditShare:
    """One reader's part of an audit: the items that begin in its share of the bytes."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def take(self, items: Sequence[T], weight: Callable[[T], int]) -> list[T]:
        """Return this reader's contiguous run of items; every item belongs to exactly one reader."""
        total, before, taken = max(1, sum(weight(item) for item in items)), 0, []
        for item in items:
            if before * self.size // total == self.rank:
                taken.append(item)
            before = min(before + weight(item), total - 1)
        return taken

    def take_chunks(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return self.take(chunks, lambda chunk: chunk.length)

    def take_files(self, names: Sequence[str], manifest: Manifest) -> list[str]:
        return self.take(names, lambda name: entry.size if (entry := manifest.file(name)) else 0)


WHOLE = AuditShare()
Expect = Callable[[Manifest], TensorExpectations]


def audit_checkpoint(
    storage: Storage, name: str, level: int, progress: Progress | None = None, expect: Expect | None = None,
    share: AuditShare = WHOLE,
) -> Report:  # fmt: skip
    """Verify at level 3 or 4, once level 2 has found all bytes intact.

    Stops at the first level that finds faults. Values pass through memory shard by shard. Several readers, each with
    its own `share`, together read every byte once; `merge_reports` combines their reports.
    """
    if level not in AUDITS:
        raise ValueError(f"audit level {level}: must be one of {sorted(AUDITS)}")
    start = time.monotonic()
    with _read_twice(storage, name) as before:
        report = verify_checkpoint(storage, name, 2, progress, before, share.take_chunks)
        faults, size, notes = list(report.faults), report.bytes, list[str]()
        if not faults:
            manifest, faults = read_sealed(storage, name)
            if manifest is not None and not faults:
                faults, read, seen = _audit_tensors(storage, manifest, level, progress, expect, share)
                size += read
                absent = level == 4 and share.leads and manifest.file(FINGERPRINTS) is None
                notes = [*([f"no {FINGERPRINTS}: fingerprints were not checked"] if absent else []), *seen]
    return Report(
        ok=not faults, level=level, bytes=size, seconds=time.monotonic() - start, faults=tuple(faults),
        notes=tuple(notes),
    )  # fmt: skip


def merge_reports(reports: Sequence[Report]) -> Report:
    """Merge the reports from all readers of one checkpoint; faults that name a chunk come first."""
    faults = list(dict.fromkeys(fault for report in reports for fault in report.faults))
    return Report(
        ok=not faults, level=reports[0].level, bytes=sum(report.bytes for report in reports),
        seconds=max(report.seconds for report in reports),
        faults=tuple(sorted(faults, key=lambda fault: fault.chunk is None)),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )  # fmt: skip


@contextmanager
def _read_twice(storage: Storage, name: str) -> Iterator[PageCacheState | None]:
    """Keep the files that are read in the page cache for a second pass, then restore the cache to its earlier state."""
    if not isinstance(storage, LocalStorage):
        yield None
        return
    # Files that do not fit would evict other data, and would themselves be evicted before the second pass.
    before = PageCacheState(keeps=_folder_bytes(storage, name) <= _available() // 4)
    try:
        yield before
    finally:
        before.drop_new_pages(storage.root / name)


def _folder_bytes(storage: Storage, name: str) -> int:
    try:
        return sum(size or 0 for size in storage.list(name).values())
    except OSError:
        return 0  # verification reports the error


def _available() -> int:
    """Return how many bytes of memory the kernel can make available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def _audit_tensors(
    storage: Storage, manifest: Manifest, level: int, progress: Progress | None, expect: Expect | None,
    share: AuditShare,
) -> tuple[list[Fault], int, list[str]]:  # fmt: skip
    try:
        index, faults = structure_faults(storage, manifest, choose_files=share.take_files)
        if level < 4 or index is None or faults:
            return faults, 0, []
        expected = expect(manifest) if expect else TensorExpectations()
        lacking = [key for key in expected.required if key not in index.tensors] if share.leads else []
        faults = [Fault(file=INDEX, reason=f"missing tensor {key}", tensors=(key,)) for key in lacking]
        found, read, notes = value_faults(storage, manifest, index, expected, progress, share)
        return faults + found, read, notes
    except CheckpointRefused as refusal:
        return [Fault(file=MANIFEST, reason=refusal.reason)], 0, []
    except OSError as error:
        return [Fault.from_error(str(error.filename or manifest.name).rpartition("/")[2], error)], 0, []


def value_faults(
    storage: Storage, manifest: Manifest, index: Index, expected: TensorExpectations, progress: Progress | None = None,
    share: AuditShare = WHOLE,
) -> tuple[list[Fault], int, list[str]]:  # fmt: skip
    """Load every value in the share once; return the faults, the number of bytes loaded, and the notes."""
    known, faults = _fingerprints(storage, manifest, index)
    with SealedCheckpoint(storage, manifest, index, known) as sealed:
        keys = share.take(sealed.in_file_order(), sealed.nbytes)
        judge = _Judge(sealed, expected, known is not None, sum(map(sealed.nbytes, keys)), progress)
        for key in keys:
            faults += judge.tensor(key)
        return faults, judge.done, judge.notes


class _Judge:
    """Checks the values one tensor at a time: fingerprints, NaN and infinities, and the owner's own checks."""

    def __init__(
        self, sealed: SealedCheckpoint, expected: TensorExpectations, has_fingerprints: bool, total: int,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._sealed, self._expected, self._has_fingerprints = sealed, expected, has_fingerprints
        self._progress, self.done, self._total = progress, 0, total
        self._trained = frozenset(expected.trained(sealed.index))
        self.notes: list[str] = []

    def tensor(self, key: str) -> Iterator[Fault]:
        """Yield the faults in one tensor."""
        parts, not_finite, nans = list[tuple[int, int]](), 0, 0
        for piece in self._sealed.pieces(key):
            before = nans
            for block, offsets in self._sealed.piece_blocks(piece):
                parts.append(partial(block, offsets, self._sealed.shape(key)))
                if block.is_floating_point() or block.is_complex():
                    # torch.isfinite does not support float8.
                    values = block.float() if block.is_floating_point() and block.itemsize == 1 else block
                    not_finite += int(values.numel() - torch.isfinite(values).sum())
                    nans += int(torch.isnan(values).sum())
                self.done += block.nbytes
                if self._progress:
                    self._progress(self.done, self._total)
            if nans > before and key in self._trained:
                yield self._fault(key, f"{nans - before} values are NaN in a trained tensor", piece)
        if not_finite and not (nans and key in self._trained):
            self.notes.append(f"{key}: {not_finite} values are NaN or infinite")
        found, saved = combine(parts), self._sealed.fingerprints.get(key)
        if self._has_fingerprints and saved != found:
            yield self._fault(key, f"fingerprint is {found}, but was {saved} when saved")
        for beginning, judge in self._expected.readable.items():
            if key.startswith(beginning) and (reason := judge(key, self._sealed.read_tensor(key))):
                yield self._fault(key, reason)

    def _fault(self, key: str, reason: str, piece: Piece | None = None) -> Fault:
        """Return a fault that gives the file and chunk of the piece, or of the tensor's first piece."""
        piece = piece or next(iter(self._sealed.pieces(key)), None)
        entry = self._sealed.manifest.file(piece.file) if piece else None
        if piece is None or entry is None:
            return Fault(file=INDEX, reason=reason, tensors=(key,))
        return Fault(file=entry.name, chunk=piece.data // entry.chunk_size, reason=reason, tensors=(key,))


def _fingerprints(storage: Storage, manifest: Manifest, index: Index) -> tuple[dict[str, str] | None, list[Fault]]:
    """Return the fingerprints taken at save time (None if the checkpoint has none) and the faults in them."""
    try:
        known = read_fingerprints(storage, manifest)
    except ManifestError as error:
        return None, [Fault(file=FINGERPRINTS, reason=str(error))]
    extra = sorted((known or {}).keys() - index.tensors.keys())
    reason = "has a fingerprint, but no such tensor exists"
    return known, [Fault(file=FINGERPRINTS, reason=f"{key} {reason}", tensors=(key,)) for key in extra]
