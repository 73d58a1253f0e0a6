"""Values of a checkpoint's tensors, a few rows at a time, so that a whole checkpoint needs little memory."""

import math
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from checkpointing.engine.restore.metadata_reader import VerifiedFile
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import Index, Manifest, Piece
from checkpointing.storage.backends import Storage

BLOCK = 64 << 20
"""Bytes of one shard held in memory at once; a single longer row is held whole."""
_OPEN = 16


class Values:
    """Reader of rows of tensors and shards, which compares every chunk with its digest; raises Refused or OSError.

    A row is the part that one index of the first dimension longer than 1 selects.
    """

    def __init__(self, storage: Storage, manifest: Manifest, index: Index) -> None:
        self._storage, self._manifest, self.index = storage, manifest, index
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in index.pieces:
            self._pieces[piece.key].append(piece)
        self._open: dict[str, tuple[BinaryIO, VerifiedFile]] = {}

    def __enter__(self) -> "Values":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pieces(self, key: str) -> list[Piece]:
        """Return the shards of one tensor, in file order."""
        return sorted(self._pieces[key], key=lambda piece: (piece.file, piece.start))

    def in_file_order(self) -> list[str]:
        """Return all tensors in the file order of their first shards; in this order every chunk is read about once."""
        places = {key: min((p.file, p.start) for p in pieces) for key, pieces in self._pieces.items()}
        return sorted(self.index.tensors, key=lambda key: (places.get(key, ("", 0)), key))

    def blocks(self, piece: Piece) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the shard in parts of about BLOCK bytes, each with its offsets in the tensor; none if it is empty."""
        if not piece.nbytes:
            return
        lead, dtype = self._lead(piece.key), self._dtype(piece.key)
        if lead is None:
            yield self._read(piece.file, piece.data, piece.nbytes, dtype).view(piece.sizes), piece.offsets
            return
        row, rows = piece.nbytes // piece.sizes[lead], piece.sizes[lead]
        step = max(1, BLOCK // row)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            block = self._read(piece.file, piece.data + first * row, count * row, dtype)
            sizes, offsets = list(piece.sizes), list(piece.offsets)
            sizes[lead], offsets[lead] = count, offsets[lead] + first
            yield block.view(sizes), tuple(offsets)

    def row_count(self, key: str) -> int:
        lead = self._lead(key)
        return 1 if lead is None else self.index.tensors[key].shape[lead]

    def row_bytes(self, key: str) -> int:
        """Return the bytes of one row of the whole tensor."""
        numel = math.prod(self.index.tensors[key].shape)
        return numel // max(1, self.row_count(key)) * self._dtype(key).itemsize

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the whole tensor, assembled from its shards, with all its dimensions."""
        lead, dtype = self._lead(key), self._dtype(key)
        shape = list(self.index.tensors[key].shape)
        if lead is None:
            (piece,) = self._pieces[key]
            return self._read(piece.file, piece.data, piece.nbytes, dtype).view(shape)
        shape[lead] = stop - start
        found = torch.zeros(shape, dtype=dtype, device="cpu")
        for piece in self.pieces(key):
            first, last = max(start, piece.offsets[lead]), min(stop, piece.offsets[lead] + piece.sizes[lead])
            if first >= last or not piece.nbytes:
                continue
            row, sizes = piece.nbytes // piece.sizes[lead], list(piece.sizes)
            sizes[lead] = last - first
            place = piece.data + (first - piece.offsets[lead]) * row
            target = found.narrow(lead, first - start, last - first)
            for dimension in range(lead + 1, len(shape)):
                target = target.narrow(dimension, piece.offsets[dimension], piece.sizes[dimension])
            target.copy_(self._read(piece.file, place, (last - first) * row, dtype).view(sizes))
        return found

    def _lead(self, key: str) -> int | None:
        """Return the dimension whose indices are rows; None for a scalar."""
        shape = self.index.tensors[key].shape
        if not shape:
            return None
        return next((at for at, size in enumerate(shape) if size != 1), 0)

    def _dtype(self, key: str) -> torch.dtype:
        dtype = getattr(torch, self.index.tensors[key].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _read(self, file: str, offset: int, length: int, dtype: torch.dtype) -> Tensor:
        held = bytearray(self._file(file).read(offset, length))
        if not held:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(held, dtype=torch.uint8).view(dtype)

    def _file(self, name: str) -> VerifiedFile:
        """Return a file, keeping the last ones open, because the shards of one row may be in several."""
        if name in self._open:
            self._open[name] = self._open.pop(name)
            return self._open[name][1]
        while len(self._open) >= _OPEN:
            self._open.pop(next(iter(self._open)))[0].close()
        entry = self._manifest.file(name)
        if entry is None:
            raise CheckpointRefused(self._manifest.name, f"{name} holds values, but the manifest does not list it")
        stream = self._storage.open(f"{self._manifest.name}/{name}")
        self._open[name] = stream, VerifiedFile(stream, entry, self._manifest.name)
        return self._open[name][1]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1][0].close()
