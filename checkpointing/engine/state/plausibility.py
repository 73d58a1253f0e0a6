"""Whether a state can be right: finite, advanced since the last save, and counted alike by optimizer and trainer.

Bytes that match their digests may still be the wrong bytes: a stale copy, a diverged model, a step half taken.
"""

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from checkpointing.engine.state.fingerprints import combine
from checkpointing.engine.state.inspection import Inspection, InspectionReport, TrainedKeys
from checkpointing.engine.state.layout import Item

REFUSE, OFF = "refuse", "off"


@dataclass(frozen=True, kw_only=True)
class StateSummary:
    """One state as far as it is judged: the trainer's step, the optimizer's highest, fingerprints of what trains."""

    step: int
    left_out: int = 0
    """Steps up to this one that the trainer never asked the optimizer to make, as after an overflow in float16."""
    optimizer_step: float | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def highest(steps: Sequence[float | None]) -> float | None:
    """The largest of several ranks' step counts, None when nobody counts."""
    return max((step for step in steps if step is not None), default=None)


def implausible_reasons(now: StateSummary, before: StateSummary | None, broken: Sequence[tuple[str, int]]) -> list[str]:
    """Reasons why a state cannot be right; `before` is what was saved or restored last, if anything was."""
    return [reason for reason in (_not_finite(broken), miscounted(now, before), _stale(now, before)) if reason]


def _not_finite(broken: Sequence[tuple[str, int]]) -> str | None:
    totals: dict[str, int] = {}
    for key, count in broken:
        totals[key] = totals.get(key, 0) + count
    if not totals:
        return None
    told = ", ".join(f"{key} ({totals[key]})" for key in sorted(totals)[:4])
    more = f" and {len(totals) - 4} more tensors" if len(totals) > 4 else ""
    return f"values that are NaN or infinite in {told}{more}"


def miscounted(now: StateSummary, before: StateSummary | None) -> str | None:
    """The optimizer's counter may have begun elsewhere, but it must move with the trainer's."""
    made, expected = _moved(now, before)
    if made == expected or before is None or math.isnan(made):  # a NaN is reported as one
        return None
    left_out = now.left_out - before.left_out
    told = f" and {left_out} that it left out" if left_out else ""
    return f"since step {before.step} the trainer counts {expected} steps{told}, the optimizer {made:g}"


def skipped(now: StateSummary, before: StateSummary | None) -> bool:
    """Whether the optimizer has taken some of the trainer's steps and skipped others."""
    made, expected = _moved(now, before)
    return 0 < made < expected


def _moved(now: StateSummary, before: StateSummary | None) -> tuple[float, float]:
    """Steps that the optimizer and the trainer have counted since; none of either when one of them does not count."""
    if before is None or now.optimizer_step is None or before.optimizer_step is None:
        return 0.0, 0.0
    return now.optimizer_step - before.optimizer_step, _asked(now, before)


def _asked(now: StateSummary, before: StateSummary) -> int:
    """How many steps the optimizer was asked to make since."""
    return now.step - before.step - (now.left_out - before.left_out)


def _stale(now: StateSummary, before: StateSummary | None) -> str | None:
    if before is None or _asked(now, before) <= 0 or not now.fingerprints:
        return None
    if dict(now.fingerprints) != dict(before.fingerprints):
        return None
    return f"all {len(now.fingerprints)} tensors that train are the same as at step {before.step}"


@dataclass(frozen=True)
class Judgement:
    """Of one state: fingerprints by key, and reasons to doubt it."""

    fingerprints: dict[str, str]
    summary: StateSummary
    implausible_reasons: tuple[str, ...]
    refused: bool = False
    miscounted: bool = False
    """Whether the optimizer's count is the only reason."""


class PlausibilityJudge:
    """Compares every state with the one that was saved or restored before it; decides on rank 0."""

    def __init__(self, mode: str = REFUSE, trained_keys: TrainedKeys | None = None) -> None:
        """`mode`: `refuse`, `warn` or `off`."""
        self._mode, self.trained_keys = mode, trained_keys or TrainedKeys()
        self._before: StateSummary | None = None

    def inspection(self) -> Inspection:
        """A fresh look at one rank's part of one state."""
        return Inspection(None if self._mode == OFF else self.trained_keys)

    def judge(
        self, step: int, everything: Sequence[Sequence[Item]], reports: Sequence[InspectionReport], left_out: int = 0
    ) -> Judgement:
        """`everything` are the items of all ranks, as their reports count them.

        `left_out`: steps since the restore, or since the beginning, that the optimizer was not asked to make.
        """
        fingerprints = _added_up(everything, [report.partials for report in reports])
        findings = [report.findings for report in reports]
        summary = StateSummary(
            step=step,
            left_out=left_out,
            optimizer_step=highest([each.optimizer_step for each in findings]),
            fingerprints=self._of_training(fingerprints),
        )
        broken = [found for each in findings for found in each.broken]
        found = [] if self._mode == OFF else implausible_reasons(summary, self._before, broken)
        counted = found == [miscounted(summary, self._before)]
        # A gradient scaler skips steps on purpose: the state is sound, so it is saved and reported.
        refused = self._mode == REFUSE and bool(found) and not (counted and skipped(summary, self._before))
        return Judgement(fingerprints, summary, tuple(found), refused, counted)

    def accept(self, judgement: Judgement) -> None:
        """This state was saved: the next one is compared with it."""
        self._before = judgement.summary

    def reject(self, judgement: Judgement) -> None:
        """This state was refused: if only for its count, the next one is counted from here, not refused for ever.

        It is still compared with the values of the last good one.
        """
        if judgement.miscounted and self._before is not None:
            now = judgement.summary
            self._before = replace(
                self._before, step=now.step, left_out=now.left_out, optimizer_step=now.optimizer_step
            )

    def set_baseline(self, step: int, optimizer_step: float | None, fingerprints: dict[str, str]) -> None:
        """This state was restored: the next one is compared with it."""
        known = self._of_training(fingerprints)
        self._before = StateSummary(step=step, optimizer_step=optimizer_step, fingerprints=known)

    def _of_training(self, fingerprints: dict[str, str]) -> dict[str, str]:
        return {key: value for key, value in fingerprints.items() if self.trained_keys.trains(key)}


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
