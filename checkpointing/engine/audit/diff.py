"""Comparison of two checkpoints by tensor: fingerprints identify equal ones, the rest is read in row blocks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.engine.audit.values import BLOCK, Values
from checkpointing.engine.restore.metadata_reader import read_whole_index
from checkpointing.errors import CheckpointRefused, ManifestError
from checkpointing.format.manifest import FINGERPRINTS, Index, Manifest, parse_fingerprints
from checkpointing.storage.backends import Storage
from checkpointing.verification.verdicts import TensorDiff
from checkpointing.verification.verify import Progress, read_listed, read_sealed

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class DiffSide:
    """A checkpoint of a comparison, with its seal and index already checked."""

    storage: Storage
    manifest: Manifest
    index: Index
    fingerprints: Mapping[str, str]


def open_side(storage: Storage, name: str) -> DiffSide:
    """Check the seal and read what is needed to compare; raises Refused or OSError."""
    manifest, faults = read_sealed(storage, name)
    if manifest is None or faults:
        raise CheckpointRefused(name, "; ".join(map(str, faults)))
    try:
        index = read_whole_index(storage, manifest)
        listed = manifest.file(FINGERPRINTS) is not None
        known = parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS)) if listed else {}
    except ManifestError as error:
        raise CheckpointRefused(name, str(error)) from error
    return DiffSide(storage, manifest, index, known)


def compare(first: DiffSide, second: DiffSide, progress: Progress | None = None) -> list[TensorDiff]:
    """Return the diff of every tensor of either checkpoint, largest relative difference first.

    Only tensors without equal fingerprints are read, and verified as they are read. `progress` receives the bytes of
    values compared. Raises Refused or OSError.
    """
    keys = sorted(first.index.tensors.keys() | second.index.tensors.keys())
    found = [_diff_metadata(first, second, key) for key in keys]
    unknown = {diff.key for diff in found if diff.comparable and not diff.equal}
    reader = _Reader(first, second, unknown, progress)
    found = [diff for diff in found if diff.key not in unknown] + reader.diff_tensors()
    return sorted(found, key=lambda diff: (-diff.weight, diff.key))


def _diff_metadata(first: DiffSide, second: DiffSide, key: str) -> TensorDiff:
    """Return what is known of a tensor before its values are read."""
    here, there = first.index.tensors.get(key), second.index.tensors.get(key)
    mark = first.fingerprints.get(key)
    equal = here is not None and here == there and mark is not None and mark == second.fingerprints.get(key)
    if not equal:
        return TensorDiff(key=key, first=here, second=there)
    return TensorDiff(
        key=key, first=here, second=there, equal=True, by_fingerprint=True, largest=0.0, relative=0.0, changed=0.0
    )


class _Reader:
    """Reader of the same rows of both sides."""

    def __init__(self, first: DiffSide, second: DiffSide, keys: set[str], progress: Progress | None) -> None:
        self._first = Values(first.storage, first.manifest, first.index)
        self._second = Values(second.storage, second.manifest, second.index)
        self._keys, self._progress, self._done = keys, progress, 0
        self._total = sum(self._first.row_bytes(key) * self._first.row_count(key) for key in keys)

    def diff_tensors(self) -> list[TensorDiff]:
        """Return the differences of those tensors, in the file order of the first side."""
        with self._first as first, self._second as second:
            return [self._difference(key, first, second) for key in first.in_file_order() if key in self._keys]

    def _difference(self, key: str, first: Values, second: Values) -> TensorDiff:
        sums, info = _Sums(), first.index.tensors[key]
        for start, stop in _spans(first, key):
            left = first.rows(key, start, stop)
            sums.add(left, second.rows(key, start, stop))
            self._done += left.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        return TensorDiff(
            key=key, first=info, second=info, equal=sums.different == 0, largest=sums.largest,
            relative=sums.relative, changed=sums.different / sums.count if sums.count else 0.0,
        )  # fmt: skip


def _spans(values: Values, key: str) -> Iterator[tuple[int, int]]:
    """Yield row spans small enough for several copies in double precision."""
    step = max(1, BLOCK // 16 // max(1, values.row_bytes(key)))
    count = values.row_count(key)
    for start in range(0, count, step):
        yield start, min(count, start + step)


class _Sums:
    """Sums over the blocks of one tensor, in double precision."""

    def __init__(self) -> None:
        self.count = self.different = 0
        self.largest = 0.0
        self._norms = [0.0, 0.0, 0.0]  # of the difference, of the first, of the second

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
        # Equal bits count as equal values, including infinities and NaN.
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
    """Return a mask of the values with equal bits in two tensors of one form."""
    equal = _words(first) == _words(second)
    return equal.view(first.numel(), -1).all(dim=-1).view(first.shape) if equal.numel() > first.numel() else equal


def _words(tensor: Tensor) -> Tensor:
    """Return the values as integers, two for each of the widest complex values."""
    word = _WORDS[min(8, tensor.itemsize)]
    return tensor.view(-1).view(word) if tensor.itemsize > 8 else tensor.view(word)


def _squares(values: Tensor) -> float:
    flat = torch.view_as_real(values).reshape(-1) if values.is_complex() else values.reshape(-1)
    return float(torch.dot(flat, flat))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
