"""Fingerprints of tensor values that do not depend on how the tensor is sharded across ranks.

A tensor is read as a matrix of words (32, 16 or 8 bits, depending on the width of its values). The row is the index in
the first dimension, the column the index in the rest. Every row and every column has an odd weight, derived from its
global number. The two weighted sums modulo 2^32 are linear, so the shards' contributions add up to the fingerprint of
the whole.

Fingerprints distinguish a stale, torn or misplaced tensor from the right one. They do not replace digests, which cover
every byte as well. The highest bit of a 32-bit word contributes 2^31 for any odd weight. In a tensor of 4- or 8-byte
floats, flipping an even number of signs therefore leaves both sums unchanged, so a tensor and its negative can have the
same fingerprint.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SLICE = 1 << 20
"""Words per block, chosen so that every pass after the first finds them in the cache."""

_MASK = 0xFFFFFFFF
_SPAN = 1 << 18
_ROW_SEED, _COLUMN_SEED = 0x1B873593, 0x5BD1E995


def word_type(dtype: torch.dtype) -> torch.dtype:
    """Return the integer type used to read values of this dtype."""
    if dtype.itemsize >= 4:
        return torch.int32
    return torch.int16 if dtype.itemsize == 2 else torch.uint8


def _mix(index: Tensor, seed: int) -> Tensor:
    """Return odd 32-bit numbers (as int32) for int64 indices. Multiplication wraps, as in murmur's finalizer."""
    mixed = (index + seed) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return ((mixed ^ (mixed >> 16)) | 1).to(torch.int32)


@lru_cache(maxsize=2)
def _table(seed: int) -> Tensor:
    return _mix(torch.arange(_SPAN, device="cpu"), seed)


def _low_weights(index: Tensor, seed: int) -> Tensor:
    """Return the weights for indices below _SPAN. Short inputs skip the table."""
    return _mix(index, seed) if index.numel() < _SPAN // 8 else _table(seed)[index]


def _weights(index: Tensor, seed: int) -> Tensor:
    """Return the weights, each a product of weights for the index's high and low bits. Cheap for long ranges."""
    return _low_weights(index & (_SPAN - 1), seed) * _mix(index // _SPAN, ~seed & _MASK)


@lru_cache(maxsize=64)
def _row_weights(start: int, count: int) -> Tensor:
    pieces = []
    for at in range(start - start % _SPAN, start + count, _SPAN):
        inside = torch.arange(max(start - at, 0), min(start + count - at, _SPAN), device="cpu")
        factor = _mix(torch.tensor([at // _SPAN], device="cpu"), ~_ROW_SEED & _MASK)
        pieces.append(_low_weights(inside, _ROW_SEED) * factor)
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32, device="cpu")


@lru_cache(maxsize=64)
def _column_weights(form: "PieceSpec", start: int, count: int) -> Tensor:
    """Return the weights of `count` of a piece's columns, beginning with column `start`."""
    place = torch.arange(start, start + count, device="cpu")
    word, rest = place % form.words, place // form.words
    index, step = torch.zeros_like(place), 1
    for offset, size, whole in reversed(list(zip(form.offsets[1:], form.sizes[1:], form.shape[1:], strict=True))):
        index += (offset + rest % size) * step
        rest, step = rest // size, step * whole
    return _weights(index * form.words + word, _COLUMN_SEED)


class PieceSpec(NamedTuple):
    """Type, size and position of a piece of a tensor; `shape` is the shape of the whole tensor."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Words per value."""
        return max(1, self.dtype.itemsize // 4)

    @property
    def rows(self) -> int:
        return self.sizes[0] if self.sizes else 1

    @property
    def columns(self) -> int:
        """Words per row."""
        return math.prod(self.sizes[1:]) * self.words

    @property
    def first_row(self) -> int:
        return self.offsets[0] if self.offsets else 0


def weighted_sums(block: Tensor, form: PieceSpec, row: int, column: int) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of a block of words (items x rows x columns).

    `row` and `column` are the position of the block in its pieces. The result is two int32 tensors with one number per
    item. The numbers wrap around, and the sums of blocks add up.
    """
    rows = _row_weights(form.first_row + row, block.shape[1]).to(block.device)
    columns = _column_weights(form, column, block.shape[2]).to(block.device)
    if block.shape[2] == 1:
        flat = block[:, :, 0].to(torch.int32)
        return (flat * rows).sum(1, dtype=torch.int32), flat.sum(1, dtype=torch.int32) * columns[0]
    by_row = (block.sum(2, dtype=torch.int32) * rows).sum(1, dtype=torch.int32)
    by_column = (block.sum(1, dtype=torch.int32) * columns).sum(1, dtype=torch.int32)
    return by_row, by_column


def blocks(items: int, rows: int, columns: int) -> Iterable[tuple[slice, slice, slice]]:
    """Yield slices of items, rows and columns that together cover everything, with about SLICE words each."""
    width = min(columns, SLICE)
    height = min(rows, max(1, SLICE // max(1, width)))
    depth = min(items, max(1, SLICE // max(1, width * height)))
    for item in range(0, items, max(1, depth)):
        for column in range(0, columns, max(1, width)):
            for row in range(0, rows, max(1, height)):
                yield (
                    slice(item, min(items, item + depth)),
                    slice(row, min(rows, row + height)),
                    slice(column, min(columns, column + width)),
                )


def partial(local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a part's contribution to the fingerprint. The part is at `offsets` in a tensor of this shape."""
    rows, columns = _digest_alike([local.cpu()], PieceSpec(local.dtype, local.shape, offsets, shape))[0].tolist()
    return rows & _MASK, columns & _MASK


def combine(parts: Iterable[tuple[int, int]]) -> str:
    """Return a tensor's fingerprint (16 hex digits), computed from the contributions of its parts."""
    rows = columns = 0
    for by_row, by_column in parts:
        rows, columns = rows + by_row, columns + by_column
    return f"{rows & _MASK:08x}{columns & _MASK:08x}"


def fingerprint(tensor: Tensor) -> str:
    """Return the fingerprint of a whole tensor."""
    return combine([partial(tensor, (0,) * tensor.dim(), tensor.shape)])


def digest_replicas(tensors: Sequence[Tensor]) -> Tensor:
    """Return a row of two int32 numbers per tensor, on the tensors' device. Equal tensors have equal numbers.

    Small tensors of the same dtype and shape are processed together, because thousands of separate calls would take too
    long.
    """
    found = torch.zeros(len(tensors), 2, dtype=torch.int32, device=tensors[0].device if tensors else "cpu")
    groups: dict[PieceSpec, list[int]] = {}
    for number, tensor in enumerate(tensors):
        form = PieceSpec(tensor.dtype, tensor.shape, (0,) * tensor.dim(), tensor.shape)
        groups.setdefault(form, []).append(number)
    for form, numbers in groups.items():
        if not math.prod(form.sizes):
            continue
        together = max(1, SLICE // (form.rows * form.columns))
        for at in range(0, len(numbers), together):
            some = numbers[at : at + together]
            found[some] = _digest_alike([tensors[number] for number in some], form).to(found.device)
    return found


def _digest_alike(tensors: Sequence[Tensor], form: PieceSpec) -> Tensor:
    plain = [each.detach().resolve_conj().resolve_neg() for each in tensors]
    values = torch.stack(plain) if len(plain) > 1 else plain[0].contiguous()
    words = values.reshape(-1).view(word_type(form.dtype)).reshape(len(plain), form.rows, form.columns)
    sums = torch.zeros(len(plain), 2, dtype=torch.int32, device=words.device)
    for item, row, column in blocks(*words.shape):
        by_row, by_column = weighted_sums(words[item, row, column], form, row.start, column.start)
        sums[item, 0] += by_row
        sums[item, 1] += by_column
    return sums
