"""The source of a restore: files with their digests, an index of their contents, and the slices that a rank needs."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from checkpointing.engine.restore.read_buffers import Open
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import Index
from checkpointing.format.read_plan import Box, Shard, Slice, Strip, intersect, overlaps, parts, strips


@dataclass(frozen=True, kw_only=True)
class OptionalKeys:
    """Keys that a checkpoint may lack: any key under a prefix in `alone`, and whole folders under one in `together`.

    A key's folder is everything before its last slash; one parameter's optimizer state is such a folder. A checkpoint
    without any key under a prefix in `together` is an error.
    """

    alone: tuple[str, ...] = ("rng/",)
    together: tuple[str, ...] = ()
    complete: tuple[str, ...] = ()
    """Prefixes under which every saved key must be wanted by some rank; otherwise its value would be silently lost."""

    def surplus(self, wanted: Container[str], known: Iterable[str]) -> bytes:
        """Return one bit, in sorted order, for each known key that must not be lost: 1 if it is not wanted."""
        bits = [key not in wanted for key in self._kept(known)]
        return sum(1 << at for at, bit in enumerate(bits) if bit).to_bytes(len(bits) // 8 + 1, "little")

    def lost(self, surplus: Sequence[bytes], known: Iterable[str]) -> list[str]:
        """Return the keys that no rank wants, given the `surplus` of each rank."""
        common = reduce(and_, (int.from_bytes(bits, "little") for bits in surplus))
        return [key for at, key in enumerate(self._kept(known)) if common >> at & 1]

    def _kept(self, known: Iterable[str]) -> list[str]:
        return sorted(key for key in known if key.startswith(self.complete) and key != NO_OPTIMIZER_STATE)

    def required_keys(self, absent: Iterable[str], known: Iterable[str]) -> list[str]:
        """Return the keys among `absent` that are required."""
        whole = tuple(prefix for prefix in self.together if any(key.startswith(prefix) for key in known))
        folders = {_folder(key) for key in known}
        rest = [key for key in absent if not key.startswith(self.alone)]
        return [key for key in rest if not key.startswith(whole) or _folder(key) in folders]


ONLY_RNG = OptionalKeys()
"""Only the states of random number generators may be missing."""

NO_OPTIMIZER_STATE = "optimizer/fresh/state"
"""Marker in imported weights, meaning that the optimizer state is missing on purpose."""


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


TensorsFor = Callable[[dict[str, Any]], Mapping[str, Tensor]]
"""Function that returns the tensors to fill from a checkpoint, given its `extra`."""


class Targets:
    """Tensors to fill: either the same for every checkpoint, or created for each checkpoint that is tried."""

    def __init__(self, tensors: Mapping[str, Tensor] | TensorsFor) -> None:
        self._make: TensorsFor = tensors if callable(tensors) else lambda _: tensors
        self.last: Mapping[str, Tensor] = {}
        """The tensors for the most recently tried checkpoint."""

    def resolve(self, extra: dict[str, Any]) -> Mapping[str, Tensor]:
        """Return the tensors for `extra`; called on all ranks with the same value."""
        self.last = self._make(extra)
        return self.last


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor's memory on this rank, detached from autograd."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_box(tensor: Tensor) -> Box:
    """Return the position of this rank's part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # A rank outside the mesh has no values and no offsets.
    return Box(
        tuple(offsets) or (0,) * tensor.dim(), tuple(sizes) if offsets or not tensor.dim() else (0,) * tensor.dim()
    )


@lru_cache(maxsize=256)
def parse_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype with this name, or None."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def number_chunks(files: Iterable[tuple[str, int, int, tuple[str, ...] | None]]) -> tuple[Shard, ...]:
    """Return files (name, size, chunk size, digests) as shards with consecutively numbered chunks."""
    shards, first = [], 0
    for name, size, chunk_size, digests in files:
        shards.append(Shard(name, size, chunk_size, digests, first))
        first += shards[-1].count
    return tuple(shards)


@dataclass(frozen=True, kw_only=True)
class LoadSource:
    """Source of a load: all files with their digests, the positions of tensors in them, and how to open a file."""

    name: str
    shards: tuple[Shard, ...]
    index: Index
    open: Open
    seen: frozenset[str]  # files that this rank can read
    patience: float = 0.0
    pause: float = 0.2
    odd: Mapping[int, Callable[[], Tensor]] = field(default_factory=dict)  # pieces that are not plain contiguous values

    @cached_property
    def shard(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.shards}

    @cached_property
    def pieces(self) -> dict[str, list[int]]:
        """Piece numbers, keyed by tensor key."""
        numbers: dict[str, list[int]] = {}
        for number, piece in enumerate(self.index.pieces):
            numbers.setdefault(piece.key, []).append(number)
        return numbers


# ---- the slices that a rank needs


class SliceBytes(NamedTuple):
    """The bytes of a needed slice: its file, its rows, their size, and the range of chunks that they span."""

    shard: Shard
    rows: list[Strip]
    nbytes: int
    chunks: range

    def by_chunk(self) -> Iterator[tuple[int, int]]:
        """Yield each chunk's number and how many of these bytes are in it."""
        if len(self.chunks) == 1:
            yield self.chunks[0], self.nbytes
        else:
            yield from ((part.chunk, part.high - part.low) for part in parts(self.rows, self.shard))


def find_slices(
    source: LoadSource, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys
) -> tuple[list[Slice], tuple[str, ...]]:
    """Return this rank's slices and the absent optional keys. Raises CheckpointRefused if a tensor does not fit."""
    known = source.index.tensors
    absent = sorted(key for key in tensors if key not in known)
    needed = optional_keys.required_keys(absent, known)
    if needed:
        more = f" and {len(needed) - 1} more" if len(needed) > 1 else ""
        raise CheckpointRefused(source.name, f"has no tensor {needed[0]}{more}", damaged=False, fits=False)
    needs: list[Slice] = []
    boxes: dict[tuple[object, ...], Box] = {}  # keyed by layout
    for key in sorted(tensors.keys() & known.keys()):
        _check_fit(source, key, tensors[key])
        tensor = tensors[key]
        mesh = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else ()
        layout = (tuple(tensor.shape), *mesh)
        local = boxes[layout] = boxes.get(layout) or local_box(tensor)
        found = [
            need
            for number in source.pieces.get(key, ())
            if (need := intersect(source.index.pieces[number], number, local)) is not None
        ]
        if len(found) != 1 or found[0].sizes != local.sizes:
            _check_cover(source.name, key, local, found)
        needs += found
    return needs, tuple(absent)


def _check_fit(source: LoadSource, key: str, tensor: Tensor) -> None:
    saved = source.index.tensors[key]
    if saved.shape != tuple(tensor.shape):
        raise CheckpointRefused(
            source.name, f"{key} has shape {saved.shape}, {tuple(tensor.shape)} here", damaged=False, fits=False
        )
    if parse_dtype(saved.dtype) != tensor.dtype:
        raise CheckpointRefused(
            source.name, f"{key} is torch.{saved.dtype}, {tensor.dtype} here", damaged=False, fits=False
        )


def _check_cover(name: str, key: str, local: Box, needs: Sequence[Slice]) -> None:
    """Check that slices cover a box exactly; a gap between saved shards would silently leave old values in place."""
    boxes = [Box(need.goal, need.sizes) for need in needs]
    covered = sum(box.volume for box in boxes)
    if covered != local.volume:
        raise CheckpointRefused(name, f"{key}: its shards hold {covered} of the {local.volume} values needed here")
    if len(boxes) > 1 and any(overlaps(boxes)):
        raise CheckpointRefused(name, f"{key}: its shards overlap")


def locate_slice(source: LoadSource, need: Slice) -> SliceBytes:
    """Return the bytes of a slice in its file. Raises CheckpointRefused if the file has no such bytes."""
    piece = source.index.pieces[need.piece]
    shard = source.shard.get(piece.file)
    dtype = parse_dtype(source.index.tensors[piece.key].dtype)
    assert dtype is not None  # it has already been checked against a local tensor
    if shard is None:
        raise CheckpointRefused(source.name, f"{piece.key} is in {piece.file}, which the manifest does not list")
    if piece.data + piece.nbytes > shard.size:
        raise CheckpointRefused(source.name, f"{piece.file} has no bytes {piece.data}..{piece.data + piece.nbytes}")
    if piece.nbytes != math.prod(piece.sizes) * dtype.itemsize:
        raise CheckpointRefused(source.name, f"{piece.key}: {piece.nbytes} bytes do not match its size")
    if need.sizes == piece.sizes:
        rows = [Strip(piece.data, 1, piece.nbytes, piece.nbytes)]
        return SliceBytes(shard, rows, piece.nbytes, shard.chunks(piece.data, piece.data + piece.nbytes))
    rows = strips(piece.sizes, need, dtype.itemsize, piece.data)
    nbytes = sum(strip.nbytes for strip in rows)
    return SliceBytes(shard, rows, nbytes, shard.chunks(rows[0].offset, rows[-1].end))
