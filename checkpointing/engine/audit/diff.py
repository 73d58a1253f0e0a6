"""Tensor-by-tensor comparison of two checkpoints. Tensors without equal fingerprints are read in blocks of rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpointing.engine.audit.sealed_checkpoint import BLOCK, SealedCheckpoint, row_spans
from checkpointing.verification.verdicts import TensorDiff
from checkpointing.verification.verify import Progress

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(first: SealedCheckpoint, second: SealedCheckpoint, progress: Progress | None = None) -> list[TensorDiff]:
    """Return the diff of every tensor in either checkpoint, largest relative difference first.

    Only tensors without equal fingerprints are read; they are verified as they are read. `progress` receives the number
    of bytes compared. Raises CheckpointRefused or OSError.
    """
    keys = sorted(first.index.tensors.keys() | second.index.tensors.keys())
    found = [_diff_metadata(first, second, key) for key in keys]
    unknown = {diff.key for diff in found if diff.comparable and not diff.equal}
    with first, second:
        compared = _compare_values(first, second, [key for key in first.in_file_order() if key in unknown], progress)
    found = [diff for diff in found if diff.key not in unknown] + compared
    return sorted(found, key=lambda diff: (-diff.weight, diff.key))


def _diff_metadata(first: SealedCheckpoint, second: SealedCheckpoint, key: str) -> TensorDiff:
    """Return what is known about a tensor's differences before its values are read."""
    here, there = first.index.tensors.get(key), second.index.tensors.get(key)
    mark = first.fingerprints.get(key)
    equal = here is not None and here == there and mark is not None and mark == second.fingerprints.get(key)
    if not equal:
        return TensorDiff(key=key, first=here, second=there)
    return TensorDiff(
        key=key, first=here, second=there, equal=True, by_fingerprint=True, largest=0.0, relative=0.0, changed=0.0
    )


def _compare_values(
    first: SealedCheckpoint, second: SealedCheckpoint, keys: Sequence[str], progress: Progress | None
) -> list[TensorDiff]:
    """Compare the values of tensors that have the same dtype and shape on both sides."""
    done, total, found = 0, sum(map(first.nbytes, keys)), []
    for key in keys:
        sums, info = _Sums(), first.index.tensors[key]
        # Small enough to hold several copies in double precision.
        for span in row_spans(info.shape, first.dtype(key).itemsize, BLOCK // 16):
            sums.add(first.read_rows(key, span), second.read_rows(key, span))
            done += span.nbytes
            if progress:
                progress(done, total)
        diff = TensorDiff(
            key=key, first=info, second=info, equal=sums.different == 0, largest=sums.largest,
            relative=sums.relative, changed=sums.different / sums.count if sums.count else 0.0,
        )  # fmt: skip
        found.append(diff)
    return found


class _Sums:
    """Sums over the blocks of one tensor, in double precision."""

    def __init__(self) -> None:
        self.count = self.different = 0
        self.largest = 0.0
        self._norms = [0.0, 0.0, 0.0]  # difference, first, second

    def add(self, first: Tensor, second: Tensor) -> None:
        if not first.numel():
            return
        self.count += first.numel()
        left, same = _wide(first), _same(first, second)
        different = first.numel() - int(same.sum())
        if not different:
            self._add_squares(0.0, left, left)
            return
        self.different += different
        right = _wide(second)
        # Values with equal bits count as equal, including infinities and NaN.
        apart = torch.where(same, torch.zeros((), dtype=left.dtype, device="cpu"), left - right)
        largest = float(apart.abs().max())
        self.largest = math.nan if math.isnan(largest) or math.isnan(self.largest) else max(self.largest, largest)
        self._add_squares(_squares(apart), left, right)

    def _add_squares(self, apart: float, left: Tensor, right: Tensor) -> None:
        first = _squares(left)
        parts = (apart, first, first if right is left else _squares(right))
        self._norms = [old + new for old, new in zip(self._norms, parts, strict=True)]

    @property
    def relative(self) -> float:
        if not self.different:
            return 0.0
        apart, larger = math.sqrt(self._norms[0]), math.sqrt(max(self._norms[1:]))
        return math.nan if math.isnan(apart) else (apart / larger if larger else math.inf)


def _same(first: Tensor, second: Tensor) -> Tensor:
    """Return a mask of the values that are bitwise equal in two tensors of the same dtype and shape."""
    equal = _words(first) == _words(second)
    return equal.view(first.numel(), -1).all(dim=-1).view(first.shape) if equal.numel() > first.numel() else equal


def _words(tensor: Tensor) -> Tensor:
    """Return the values as integers: two per value for the widest complex type, otherwise one."""
    word = _WORDS[min(8, tensor.itemsize)]
    return tensor.view(-1).view(word) if tensor.itemsize > 8 else tensor.view(word)


def _squares(values: Tensor) -> float:
    flat = torch.view_as_real(values).reshape(-1) if values.is_complex() else values.reshape(-1)
    return float(torch.dot(flat, flat))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
