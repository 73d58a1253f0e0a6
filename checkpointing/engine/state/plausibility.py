"""Checks on staged bytes before a commit: NaN weights and unequal replicas.

There is no other property that holds for every healthy program. Optimizer steps, counters, constant values and
infinities are up to the program.
"""

import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from checkpointing.engine.state.fingerprints import PieceSpec, blocks, combine, weighted_sums, word_type
from checkpointing.engine.state.layout import Item
from checkpointing.message_codec import peer_message

_ROUNDED_SUM = (torch.float16,)
"""Types whose sums soon overflow in their own precision."""


@peer_message
@dataclass(frozen=True)
class InspectionReport:
    """One rank's report: two 32-bit numbers per item, in item order, and the trained weights with NaN (key, count).

    `replicas` has two numbers for each tensor piece that other ranks also hold, in the order of `AgreedPlan.shared`.
    """

    partials: bytes
    broken: tuple[tuple[str, int], ...] = ()
    replicas: bytes = b""


class Inspection:
    """One rank's fingerprint contributions and findings, collected part by part."""

    def __init__(self, trained_keys: Collection[str] = ()) -> None:
        """Create an inspection that checks the weights in `trained_keys` for NaN."""
        self._trained_keys = trained_keys
        self._partials = bytearray()
        self._broken: list[tuple[str, int]] = []

    def inspect(self, memory: Tensor, items: Sequence[Item]) -> None:
        """Inspect items whose values are in `memory`, which is a buffer as bytes."""
        for batch in _batches(items):
            self._partials += self._inspect_batch(memory, batch)

    def report(self, replicas: bytes = b"") -> InspectionReport:
        return InspectionReport(bytes(self._partials), tuple(self._broken), replicas)

    def _inspect_batch(self, memory: Tensor, batch: Sequence[Item]) -> bytes:
        form = piece_spec(batch[0])
        words = _words(memory, batch, form)
        room = bytearray(8 * len(batch))
        sums = torch.frombuffer(room, dtype=torch.int32).view(len(batch), 2)
        trains = self._trains(batch)
        for item, row, column in blocks(*words.shape):
            block = words[item, row, column]
            by_row, by_column = weighted_sums(block, form, row.start, column.start)
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


def piece_spec(item: Item) -> PieceSpec:
    return PieceSpec(item.dtype, item.shape, item.share.offsets, item.share.whole)


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield runs of neighbours that have the same PieceSpec and are evenly spaced."""
    for _, alike in groupby(items, piece_spec):
        batch: list[Item] = []
        for item in alike:
            if len(batch) > 1 and item.place - batch[-1].place != batch[1].place - batch[0].place:
                yield batch
                batch = []
            batch.append(item)
        yield batch


def _words(memory: Tensor, batch: Sequence[Item], form: PieceSpec) -> Tensor:
    """Return the values of a batch as integers (items x rows x columns), without copying them."""
    kind = word_type(form.dtype)
    distance = batch[1].place - batch[0].place if len(batch) > 1 else 0
    size = (len(batch), form.rows if batch[0].piece.nbytes else 0, form.columns)
    strides = (distance // kind.itemsize, form.columns, 1)
    return torch.as_strided(memory.view(kind), size, strides, batch[0].place // kind.itemsize)


def _values(words: Tensor, dtype: torch.dtype) -> Tensor:
    values = words.contiguous().view(dtype)
    return values if dtype.itemsize > 1 else values.to(torch.float32)  # 8-bit floats support few operations


def _sum_is_nan(block: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a block may contain NaN. A NaN survives every sum, but infinities can produce one too."""
    if dtype.itemsize == 1:
        return bool(torch.isnan(_values(block, dtype)).any())
    values = block.view(dtype)
    total = values.sum(dtype=torch.float32) if dtype in _ROUNDED_SUM else values.sum()
    return bool(torch.isnan(total))


REFUSE, OFF = "refuse", "off"
_NAMED = 4


@dataclass(frozen=True)
class StateJudgement:
    """The verdict on one state: its fingerprints by key, and the reasons not to save it."""

    fingerprints: dict[str, str]
    reasons: tuple[str, ...] = ()
    refused: bool = False


def judge_state(
    mode: str, everything: Sequence[Sequence[Item]], reports: Sequence[InspectionReport],
    replicas: Sequence[Sequence[str]] = (),
) -> StateJudgement:  # fmt: skip
    """Judge a state on rank 0, before it is committed. `mode` is `refuse`, `warn` or `off`.

    `everything` has all ranks' items, in the same order as `reports`; `replicas` is as in `AgreedPlan`.
    """
    fingerprints = _added_up(everything, [report.partials for report in reports])
    if mode == OFF:
        return StateJudgement(fingerprints)
    nan = nan_reason([found for report in reports for found in report.broken])
    found = tuple(filter(None, [nan, differing_reason(replicas, [report.replicas for report in reports])]))
    return StateJudgement(fingerprints, found, bool(found) and mode == REFUSE)


def nan_reason(broken: Sequence[tuple[str, int]]) -> str:
    """Describe the weights that contain NaN; empty if none does."""
    totals: dict[str, int] = {}
    for key, count in broken:
        totals[key] = totals.get(key, 0) + count
    if not totals:
        return ""
    return f"NaN in trained weights: {_format_tensors({key: f' ({count})' for key, count in totals.items()})}"


def differing_reason(replicas: Sequence[Sequence[str]], digests: Sequence[bytes]) -> str:
    """Describe the shared values that differ between ranks; empty if all replicas are equal.

    `replicas` lists each rank's pieces that other ranks also hold; `digests` has eight bytes for each of them.
    """
    first: dict[str, tuple[int, bytes]] = {}
    differing: dict[str, str] = {}
    for rank, (pieces, found) in enumerate(zip(replicas, digests, strict=False)):
        if len(found) != 8 * len(pieces):
            continue
        for at, piece in enumerate(pieces):
            owner, known = first.setdefault(piece, (rank, found[8 * at : 8 * at + 8]))
            if known != found[8 * at : 8 * at + 8]:
                differing.setdefault(piece.rpartition("@")[0], f" (ranks {owner} and {rank})")
    if not differing:
        return ""
    return (
        f"saved once for all ranks, which have different values of {_format_tensors(differing)}: keep them equal, or "
        "set checkpoint.plausibility=warn to save the value of one rank"
    )


def _format_tensors(found: Mapping[str, str]) -> str:
    more = f" and {len(found) - _NAMED} more tensors" if len(found) > _NAMED else ""
    return ", ".join(f"{key}{found[key]}" for key in sorted(found)[:_NAMED]) + more


def _added_up(everything: Sequence[Sequence[Item]], partials: Sequence[bytes]) -> dict[str, str]:
    """Return the fingerprints, keyed by tensor key.

    Most keys have one part, so this is cheap; it must be, as it holds the GIL during training.
    """
    found: dict[str, str] = {}
    several: dict[str, list[str]] = {}
    for items, numbers in zip(everything, partials, strict=True):
        text = _big_endian(numbers).hex()
        for at, item in enumerate(items):
            part = text[16 * at : 16 * at + 16]
            if item.key in found:
                several.setdefault(item.key, [found[item.key]]).append(part)
            else:
                found[item.key] = part
    for key, texts in several.items():
        found[key] = combine((int(text[:8], 16), int(text[8:], 16)) for text in texts)
    return found


def _big_endian(numbers: bytes) -> bytes:
    words = array("I", numbers)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
