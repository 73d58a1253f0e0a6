"""A rank's read plan: boxes in saved pieces, and the file bytes that hold them. Pure functions, without torch.

A box in a row-major array is a few strips, which are rows of equal length at a constant stride. Its bytes have the same
order in the file as in the packed box, so the bytes between two file offsets always form one interval of the packed
box.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from checkpointing.format.manifest import Piece

Numbers = tuple[int, ...]


@lru_cache(maxsize=4096)
def strides(shape: Numbers) -> Numbers:
    """Return the strides of a row-major array, in values."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


class Box(NamedTuple):
    """A part of a tensor: its start and length in every dimension."""

    offsets: Numbers
    sizes: Numbers

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)


class Slice(NamedTuple):
    """A box in one piece. `source` is its start in the piece, `goal` its start in the local tensor."""

    key: str
    piece: int  # the piece's number in the index
    source: Numbers
    goal: Numbers
    sizes: Numbers


class Strip(NamedTuple):
    """`repeats` rows of `length` bytes, whose starts are `stride` bytes apart. The first row starts at `offset`."""

    offset: int
    repeats: int
    stride: int
    length: int

    @property
    def nbytes(self) -> int:
        return self.repeats * self.length

    @property
    def end(self) -> int:
        return self.offset + (self.repeats - 1) * self.stride + self.length

    def before(self, place: int) -> int:
        """Return how many bytes of the strip lie before `place`."""
        if place <= self.offset:
            return 0
        rows, rest = divmod(place - self.offset, self.stride)
        return min(rows * self.length + min(rest, self.length), self.nbytes)


def intersect(piece: Piece, number: int, local: Box) -> Slice | None:
    """Return the part of a piece that lies in a local box, or None if they do not overlap."""
    if piece.offsets == local.offsets and piece.sizes == local.sizes:
        nothing = (0,) * len(piece.sizes)
        return Slice(piece.key, number, nothing, nothing, piece.sizes) if local.volume else None
    source, goal, sizes = [], [], []
    for start, size, here, room in zip(piece.offsets, piece.sizes, local.offsets, local.sizes, strict=True):
        first, end = max(start, here), min(start + size, here + room)
        if first >= end:
            return None
        source.append(first - start)
        goal.append(first - here)
        sizes.append(end - first)
    return Slice(piece.key, number, tuple(source), tuple(goal), tuple(sizes))


def strips(whole: Sequence[int], need: Slice, itemsize: int, base: int) -> list[Strip]:
    """Return a slice's strips in its file. `whole` is the piece's shape, `base` the file offset of its values."""
    steps = [step * itemsize for step in strides(tuple(whole))]
    start = base + sum(at * step for at, step in zip(need.source, steps, strict=True))
    dimension, length, inner_whole = len(whole), itemsize, True
    while dimension and inner_whole:
        # All inner dimensions are complete, so their rows are contiguous.
        dimension -= 1
        length *= need.sizes[dimension]
        inner_whole = need.sizes[dimension] == whole[dimension]
    if dimension == 0:
        return [Strip(start, 1, length, length)]
    outer = [range(0, size * step, step) for size, step in zip(need.sizes[: dimension - 1], steps, strict=False)]
    count, stride = need.sizes[dimension - 1], steps[dimension - 1]
    return [Strip(start + sum(places), count, stride, length) for places in itertools.product(*outer)]


def before(rows: Iterable[Strip], place: int) -> int:
    """Return how many bytes of all strips lie before `place`."""
    return sum(strip.before(place) for strip in rows)


def overlaps(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield pairs of boxes that share a value. Only boxes that overlap in the first dimension are compared."""
    full = sorted((box for box in boxes if box.volume), key=lambda box: box.offsets)
    if full and not full[0].sizes:
        yield from itertools.pairwise(full)
        return
    for at, box in enumerate(full):
        end = box.offsets[0] + box.sizes[0]
        for following in range(at + 1, len(full)):
            other = full[following]
            if other.offsets[0] >= end:
                break
            if _meet(box, other):
                yield box, other


def _meet(one: Box, other: Box) -> bool:
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in ends)


# ---- chunks: the unit that is read and compared with a digest


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to read from: its size and its chunks' digests, or None for a file without digests."""

    name: str
    size: int
    chunk_size: int
    digests: tuple[str, ...] | None
    first: int  # number of its first chunk, counting the chunks of all files

    @property
    def count(self) -> int:
        return -(-self.size // self.chunk_size)

    def span(self, chunk: int) -> tuple[int, int]:
        """Return where a chunk starts and ends in its file, given its number among all chunks."""
        start = (chunk - self.first) * self.chunk_size
        return start, min(start + self.chunk_size, self.size)

    def chunks(self, start: int, end: int) -> range:
        """Return the numbers of the chunks that hold these bytes."""
        if start >= end:
            return range(0)
        return range(self.first + start // self.chunk_size, self.first + (end - 1) // self.chunk_size + 1)


class ChunkPart(NamedTuple):
    """Bytes `low` to `high` of a packed slice, all within one chunk."""

    chunk: int
    low: int
    high: int


def parts(rows: Sequence[Strip], shard: Shard) -> Iterator[ChunkPart]:
    """Yield the bytes of a slice chunk by chunk; chunks that hold none of them are skipped."""
    low = 0
    for chunk in shard.chunks(rows[0].offset, rows[-1].end):
        high = before(rows, shard.span(chunk)[1])
        if high > low:
            yield ChunkPart(chunk, low, high)
            low = high
