"""Checks before a commit: no trained weight is NaN, and all replicas of a value are equal.

No other property holds for every healthy program. Optimizer steps, counters, constant values and infinities are up to
the program.
"""

import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.engine.state.fingerprints import combine
from checkpointing.engine.state.inspection import Inspection, InspectionReport
from checkpointing.engine.state.layout import Item

REFUSE, OFF = "refuse", "off"
_NAMED = 4


@dataclass(frozen=True)
class Judgement:
    """The verdict on one state: its fingerprints by key, and the reasons not to save it."""

    fingerprints: dict[str, str]
    reasons: tuple[str, ...] = ()
    refused: bool = False


class PlausibilityJudge:
    """Judges every state before its commit; decides on rank 0."""

    def __init__(self, mode: str = REFUSE) -> None:
        """`mode`: `refuse`, `warn` or `off`."""
        self._mode = mode

    @property
    def is_off(self) -> bool:
        return self._mode == OFF

    def inspection(self, trained: Collection[str] = ()) -> Inspection:
        """Begin the inspection of one rank's part of a state; `trained`: keys of its trained weights."""
        return Inspection(() if self.is_off else trained)

    def judge(
        self, everything: Sequence[Sequence[Item]], reports: Sequence[InspectionReport],
        replicas: Sequence[Sequence[str]] = (),
    ) -> Judgement:  # fmt: skip
        """`everything` are the items of all ranks, as their reports count them; `replicas` as in `Plan`."""
        fingerprints = _added_up(everything, [report.partials for report in reports])
        if self.is_off:
            return Judgement(fingerprints)
        nan = nan_reason([found for report in reports for found in report.findings.broken])
        found = tuple(filter(None, [nan, differing_reason(replicas, [report.replicas for report in reports])]))
        return Judgement(fingerprints, found, bool(found) and self._mode == REFUSE)


def nan_reason(broken: Sequence[tuple[str, int]]) -> str:
    """Describe the weights with NaN; empty if no weight has any."""
    totals: dict[str, int] = {}
    for key, count in broken:
        totals[key] = totals.get(key, 0) + count
    if not totals:
        return ""
    return f"NaN in trained weights: {_format_tensors({key: f' ({count})' for key, count in totals.items()})}"


def differing_reason(replicas: Sequence[Sequence[str]], digests: Sequence[bytes]) -> str:
    """Describe the shared values that differ between ranks; empty if all replicas are equal.

    `replicas`: the pieces of each rank that other ranks have too; `digests`: eight bytes for each of them.
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
        "type checkpoint.plausibility=warn to save the value of one rank"
    )


def _format_tensors(found: Mapping[str, str]) -> str:
    more = f" and {len(found) - _NAMED} more tensors" if len(found) > _NAMED else ""
    return ", ".join(f"{key}{found[key]}" for key in sorted(found)[:_NAMED]) + more


def _added_up(everything: Sequence[Sequence[Item]], partials: Sequence[bytes]) -> dict[str, str]:
    """Fingerprints by key. It holds the GIL while training runs: most keys have one part, and those are cheap."""
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
