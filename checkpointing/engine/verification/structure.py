"""Whether a checkpoint is whole: `.metadata`, index and frames agree, and every tensor is covered once and fully."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch.distributed.checkpoint.metadata import Metadata

from checkpointing.engine.restore.metadata_reader import (
    VerifiedFile,
    index_from_metadata,
    read_metadata,
    read_whole_index,
)
from checkpointing.engine.restore.source import dtype_of
from checkpointing.errors import Refused
from checkpointing.format.index import INDEX, Index, Piece, TensorInfo
from checkpointing.format.manifest import COMMIT, MANIFEST, METADATA, FileEntry, Manifest
from checkpointing.format.read_plan import Box, overlaps
from checkpointing.format.torch_record import ReadAt, read_record
from checkpointing.storage.backends import Storage
from checkpointing.verification.verify import Fault, Progress

ChooseFiles = Callable[[Sequence[str], Manifest], Sequence[str]]


def strays(storage: Storage, manifest: Manifest) -> list[Fault]:
    """Names in the folder that nobody vouches for."""
    known = {COMMIT, MANIFEST, *(entry.name for entry in manifest.files)}
    found = sorted(set(storage.list(manifest.name)) - known)
    return [Fault(file=name, chunk=None, reason=f"is not listed in {MANIFEST}") for name in found]


def structure_faults(
    storage: Storage, manifest: Manifest, progress: Progress | None = None, choose_files: ChooseFiles | None = None
) -> tuple[Index | None, list[Fault]]:
    """What is wrong with the structure of a checkpoint whose bytes are as they were written, and its index.

    `choose_files` selects the files whose frames are read here.
    """
    faults = strays(storage, manifest)
    try:
        index = read_whole_index(storage, manifest)
    except Refused as refusal:
        file = INDEX if manifest.file(INDEX) else METADATA
        return None, [*faults, Fault(file=file, chunk=None, reason=refusal.reason)]
    try:
        faults += disagreements(index, read_metadata(storage, manifest))
    except Refused as refusal:
        faults.append(Fault(file=METADATA, chunk=None, reason=refusal.reason))
    faults += cover_faults(index)
    outside = list(_outside(index, {entry.name: entry for entry in manifest.files}))
    faults += outside
    if not outside:
        faults += record_faults(storage, manifest, index, progress, choose_files)
    return index, faults


def disagreements(index: Index, metadata: Metadata) -> list[Fault]:
    """Where `.metadata`, which plain DCP reads, tells something else than the index, which we read."""
    theirs = index_from_metadata(metadata)
    foreign = [key for key in metadata.state_dict_metadata if key not in theirs.tensors]
    faults = [_metadata_fault(key, "is no tensor in it") for key in foreign]
    for key in sorted(theirs.tensors.keys() | index.tensors.keys()):
        there, here = theirs.tensors.get(key), index.tensors.get(key)
        if there != here:
            faults.append(_metadata_fault(key, f"is {_kind(there)} in it, {_kind(here)} in {INDEX}"))
    places, ours = _places(theirs), _places(index)
    for place in sorted(places.keys() | ours.keys()):
        if places.get(place) != ours.get(place):
            faults.append(_metadata_fault(place[0], f"has its shard at {place[1]} elsewhere than {INDEX} says"))
    return faults


def _places(index: Index) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int, tuple[int, ...]]]:
    return {(piece.key, piece.offsets): (piece.file, piece.start, piece.length, piece.sizes) for piece in index.pieces}


def _metadata_fault(key: str, what: str) -> Fault:
    return Fault(file=METADATA, chunk=None, reason=f"{key} {what}", tensors=(key,))


def _kind(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {info.shape}"


def cover_faults(index: Index) -> list[Fault]:
    """Holes and overlaps: every value of every tensor must lie in exactly one piece, of the right number of bytes."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in index.pieces:
        pieces[piece.key].append(piece)
    faults = []
    for key, info in sorted(index.tensors.items()):
        reason = _cover(info, pieces[key])
        if reason:
            file = pieces[key][0].file if pieces[key] else INDEX
            faults.append(Fault(file=file, chunk=None, reason=reason, tensors=(key,)))
    return faults


def _cover(info: TensorInfo, pieces: Sequence[Piece]) -> str:
    dtype = dtype_of(info.dtype)
    if dtype is None:
        return f"no dtype is called {info.dtype}"
    for piece in pieces:
        if piece.nbytes != math.prod(piece.sizes) * dtype.itemsize:
            return f"the shard at {piece.offsets} has {piece.nbytes} bytes for {piece.sizes} of {info.dtype}"
    clash = next(overlaps(Box(piece.offsets, piece.sizes) for piece in pieces), None)
    if clash:
        return f"the shards at {clash[0].offsets} and {clash[1].offsets} overlap"
    held, wanted = sum(math.prod(piece.sizes) for piece in pieces), math.prod(info.shape)
    return "" if held == wanted else f"its shards hold {held} of {wanted} values"


def _outside(index: Index, files: Mapping[str, FileEntry]) -> Iterator[Fault]:
    """Frames that no file holds, or that lie in each other."""
    for file, pieces in _by_file(index.pieces).items():
        entry = files.get(file)
        if entry is None:
            yield Fault(
                file=file, chunk=None, reason=f"is not listed in {MANIFEST}, but holds shards", tensors=_keys(pieces)
            )
            continue
        for piece, following in pairwise([*pieces, None]):
            assert piece is not None
            end = entry.size if following is None else following.start
            if piece.start + piece.length > end:
                what = f"ends at {entry.size}" if following is None else f"has another shard from {end} on"
                reason = f"a shard takes bytes {piece.start} to {piece.start + piece.length}, but the file {what}"
                yield Fault(file=file, chunk=None, reason=reason, tensors=(piece.key,))


def record_faults(
    storage: Storage, manifest: Manifest, index: Index, progress: Progress | None = None,
    choose_files: ChooseFiles | None = None,
) -> list[Fault]:  # fmt: skip
    """Frames that do not say themselves what the index says of them: plain `torch.load` reads the frame."""
    faults, done = [], 0
    by_file = _by_file(index.pieces)
    for file in choose_files(list(by_file), manifest) if choose_files else by_file:
        pieces, entry = by_file[file], manifest.file(file)
        assert entry is not None
        with storage.open(f"{manifest.name}/{file}") as stream:
            # By whole chunks: a frame takes many small reads, each of which is a request where the file is far away.
            verified = VerifiedFile(stream, entry, manifest.name)
            for piece in pieces:
                reason = _record_reason(verified.read, piece, index.tensors[piece.key])
                if reason:
                    chunk = piece.start // entry.chunk_size
                    faults.append(Fault(file=file, chunk=chunk, reason=reason, tensors=(piece.key,)))
                done += 1
                if progress:
                    progress(done, len(index.pieces))
    return faults


def _record_reason(read: ReadAt, piece: Piece, info: TensorInfo) -> str:
    try:
        record = read_record(read, piece.start, piece.length)
    except ValueError as error:
        return f"no whole frame at {piece.start}: {error}"
    found = (record.dtype, record.shape, piece.start + record.data, record.nbytes)
    wanted = (info.dtype, piece.sizes, piece.data, piece.nbytes)
    return "" if found == wanted else f"the frame at {piece.start} says {found}, the index {wanted}"


def _by_file(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    files: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
        files.setdefault(piece.file, []).append(piece)
    return files


def _keys(pieces: Iterable[Piece]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece.key for piece in pieces))
