"""Access to a sealed checkpoint's tensors, which are read a few rows at a time to save memory."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from checkpointing.engine.restore.metadata_reader import VerifiedFile, read_index
from checkpointing.engine.state.layout import region
from checkpointing.errors import CheckpointRefused, ManifestError
from checkpointing.format.manifest import Index, Manifest, Piece
from checkpointing.storage.backends import Storage
from checkpointing.verification.verify import read_fingerprints, read_sealed

BLOCK = 64 << 20
"""Maximum bytes held in memory, unless a single row is longer."""
_MAX_OPEN = 16


@dataclass(frozen=True)
class RowSpan:
    """Some rows of a tensor: their position in it, and the byte range of their values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    nbytes: int


def row_dimension(shape: tuple[int, ...]) -> int:
    """Return the dimension whose indices are rows: the first one longer than 1."""
    return next((at for at, size in enumerate(shape) if size != 1), 0)


def row_spans(shape: tuple[int, ...], itemsize: int, limit: int = 0) -> Iterator[RowSpan]:
    """Yield spans of at most `limit` bytes (default: BLOCK) in value order; none if the tensor is empty."""
    total = math.prod(shape) * itemsize
    if not total:
        return
    if not shape:
        yield RowSpan((), (), 0, total)
        return
    lead = row_dimension(shape)
    row = total // shape[lead]
    step = max(1, (limit or BLOCK) // row)
    for first in range(0, shape[lead], step):
        count = min(step, shape[lead] - first)
        offsets = tuple(first if at == lead else 0 for at in range(len(shape)))
        sizes = tuple(count if at == lead else size for at, size in enumerate(shape))
        yield RowSpan(offsets, sizes, first * row, count * row)


class SealedCheckpoint:
    """Reader of tensors and shards that compares every chunk with its digest. Raises CheckpointRefused or OSError."""

    def __init__(
        self, storage: Storage, manifest: Manifest, index: Index, fingerprints: Mapping[str, str] | None = None
    ) -> None:
        self._storage, self.manifest, self.index = storage, manifest, index
        self.fingerprints = fingerprints or {}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in sorted(index.pieces, key=lambda piece: (piece.file, piece.start)):
            self._pieces[piece.key].append(piece)
        self._open: dict[str, tuple[BinaryIO, VerifiedFile]] = {}

    @classmethod
    def open(cls, storage: Storage, name: str) -> "SealedCheckpoint":
        """Check the seal and read the index and fingerprints."""
        manifest, faults = read_sealed(storage, name)
        if manifest is None or faults:
            raise CheckpointRefused(name, "; ".join(map(str, faults[:4])))
        try:
            index = read_index(storage, manifest)
            return cls(storage, manifest, index, read_fingerprints(storage, manifest))
        except ManifestError as error:
            raise CheckpointRefused(name, str(error)) from error

    def __enter__(self) -> "SealedCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1][0].close()

    def shape(self, key: str) -> tuple[int, ...]:
        return self.index.tensors[key].shape

    def dtype(self, key: str) -> torch.dtype:
        dtype = getattr(torch, self.index.tensors[key].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def nbytes(self, key: str) -> int:
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def pieces(self, key: str) -> list[Piece]:
        """Return the shards of one tensor, in file order."""
        return self._pieces[key]

    def in_file_order(self) -> list[str]:
        """Return all tensor keys, ordered by where their first shards are stored.

        Reading in this order reads each chunk about once.
        """
        places = {key: (pieces[0].file, pieces[0].start) for key, pieces in self._pieces.items() if pieces}
        return sorted(self.index.tensors, key=lambda key: (places.get(key, ("", 0)), key))

    def piece_blocks(self, piece: Piece) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield a shard in parts of about BLOCK bytes, each with its offsets in the tensor."""
        dtype = self.dtype(piece.key)
        for span in row_spans(piece.sizes, dtype.itemsize):
            offsets = tuple(base + offset for base, offset in zip(piece.offsets, span.offsets, strict=True))
            yield self._read(piece.file, piece.data + span.start, span.nbytes, dtype).view(span.sizes), offsets

    def blocks(self, key: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the whole tensor in value order, in parts with their offsets."""
        for span in row_spans(self.shape(key), self.dtype(key).itemsize):
            yield self.read_rows(key, span), span.offsets

    def read_tensor(self, key: str) -> Tensor:
        """Return the whole tensor."""
        return self.read_rows(key, RowSpan((0,) * len(self.shape(key)), self.shape(key), 0, self.nbytes(key)))

    def read_rows(self, key: str, span: RowSpan) -> Tensor:
        """Return rows of the whole tensor, assembled from its shards."""
        lead, dtype = row_dimension(self.shape(key)), self.dtype(key)
        if not span.sizes:
            (piece,) = self._pieces[key]
            return self._read(piece.file, piece.data, piece.nbytes, dtype).view(())
        start, stop = span.offsets[lead], span.offsets[lead] + span.sizes[lead]
        found = torch.zeros(span.sizes, dtype=dtype, device="cpu")
        for piece in self._pieces[key]:
            first, last = max(start, piece.offsets[lead]), min(stop, piece.offsets[lead] + piece.sizes[lead])
            if first >= last or not piece.nbytes:
                continue
            row, offsets, sizes = piece.nbytes // piece.sizes[lead], list(piece.offsets), list(piece.sizes)
            offsets[lead], sizes[lead] = first - start, last - first
            place = piece.data + (first - piece.offsets[lead]) * row
            values = self._read(piece.file, place, (last - first) * row, dtype)
            region(found, offsets, sizes).copy_(values.view(sizes))
        return found

    def _read(self, file: str, offset: int, length: int, dtype: torch.dtype) -> Tensor:
        held = bytearray(self._file(file).read(offset, length))
        if not held:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(held, dtype=torch.uint8).view(dtype)

    def _file(self, name: str) -> VerifiedFile:
        """Return an open file. The most recent few stay open, because the shards of one row may be in several files."""
        if name in self._open:
            self._open[name] = self._open.pop(name)
            return self._open[name][1]
        while len(self._open) >= _MAX_OPEN:
            self._open.pop(next(iter(self._open)))[0].close()
        entry = self.manifest.file(name)
        if entry is None:
            raise CheckpointRefused(self.manifest.name, f"{name} holds values, but the manifest does not list it")
        stream = self._storage.open(f"{self.manifest.name}/{name}")
        self._open[name] = stream, VerifiedFile(stream, entry, self.manifest.name)
        return self._open[name][1]
