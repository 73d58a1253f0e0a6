"""An inspection of staged bytes while they are being written: fingerprints, and weights that are NaN."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.engine.state.fingerprints import Form, blocks, weighted, word_type
from checkpointing.engine.state.layout import Item

_ROUNDED_SUM = (torch.float16,)
"""Types whose own sums overflow early."""


@peer_message
@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of one rank in its part of a state: trained weights with NaN, as (key, number of NaN values)."""

    broken: tuple[tuple[str, int], ...] = ()


@peer_message
@dataclass(frozen=True)
class InspectionReport:
    """What a rank sends: two 32-bit numbers for each of its items, in their order, and its findings.

    `replicas` has as many numbers for each value that other ranks have too, in the order of `Plan.shared`.
    """

    partials: bytes
    findings: Findings
    replicas: bytes = b""


class Inspection:
    """Fingerprint parts and findings of one rank, collected part by part."""

    def __init__(self, trained_keys: Collection[str] = ()) -> None:
        """`trained_keys`: keys of the trained weights; only these are checked for NaN."""
        self._trained_keys = trained_keys
        self._partials = bytearray()
        self._broken: list[tuple[str, int]] = []

    def inspect(self, memory: Tensor, items: Sequence[Item]) -> None:
        """Inspect items whose values lie in `memory`, a buffer as bytes."""
        for batch in _batches(items):
            self._partials += self._inspect_batch(memory, batch)

    def report(self, replicas: bytes = b"") -> InspectionReport:
        return InspectionReport(bytes(self._partials), Findings(broken=tuple(self._broken)), replicas)

    def _inspect_batch(self, memory: Tensor, batch: Sequence[Item]) -> bytes:
        form = form_of(batch[0])
        words = _words(memory, batch, form)
        room = bytearray(8 * len(batch))
        sums = torch.frombuffer(room, dtype=torch.int32).view(len(batch), 2)
        trains = self._trains(batch)
        for item, row, column in blocks(*words.shape):
            block = words[item, row, column]
            by_row, by_column = weighted(block, form, row.start, column.start)
            sums[item, 0] += by_row
            sums[item, 1] += by_column
            if trains and _sum_is_nan(block, form.dtype):
                self._name_broken(block, form.dtype, batch[item])
        return bytes(room)

    def _trains(self, batch: Sequence[Item]) -> bool:
        dtype = batch[0].dtype
        floats = dtype.is_floating_point or dtype.is_complex
        return floats and any(item.key in self._trained_keys for item in batch)

    def _name_broken(self, block: Tensor, dtype: torch.dtype, items: Sequence[Item]) -> None:
        for words, item in zip(block, items, strict=True):
            count = int(torch.isnan(_values(words, dtype)).sum())
            if count and item.key in self._trained_keys:
                self._broken.append((item.key, count))


def form_of(item: Item) -> Form:
    return Form.of(item.dtype, item.shape, item.share.offsets, item.share.whole)


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Neighbours of one form, as long as they lie at a constant distance."""
    for _, alike in groupby(items, form_of):
        batch: list[Item] = []
        for item in alike:
            if len(batch) > 1 and item.place - batch[-1].place != batch[1].place - batch[0].place:
                yield batch
                batch = []
            batch.append(item)
        yield batch


def _words(memory: Tensor, batch: Sequence[Item], form: Form) -> Tensor:
    """The values of a batch: items x rows x columns of integers, without a copy."""
    kind = word_type(form.dtype)
    distance = batch[1].place - batch[0].place if len(batch) > 1 else 0
    size = (len(batch), form.rows if batch[0].piece.nbytes else 0, form.columns)
    strides = (distance // kind.itemsize, form.columns, 1)
    return torch.as_strided(memory.view(kind), size, strides, batch[0].place // kind.itemsize)


def _values(words: Tensor, dtype: torch.dtype) -> Tensor:
    values = words.contiguous().view(dtype)
    return values if dtype.itemsize > 1 else values.to(torch.float32)  # eight-bit floats know few operations


def _sum_is_nan(block: Tensor, dtype: torch.dtype) -> bool:
    """Whether there may be a NaN, found by one number: a NaN survives every sum, in which infinities make one, too."""
    if dtype.itemsize == 1:
        return bool(torch.isnan(_values(block, dtype)).any())
    values = block.view(dtype)
    total = values.sum(dtype=torch.float32) if dtype in _ROUNDED_SUM else values.sum()
    return bool(torch.isnan(total))
