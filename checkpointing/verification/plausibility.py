"""Whether a state can be right: finite, advanced since the last save, and counted alike by optimizer and trainer.

Bytes that match their digests may still be the wrong bytes: a stale copy, a diverged model, a step half taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

REFUSE, WARN, OFF = "refuse", "warn", "off"


@dataclass(frozen=True, kw_only=True)
class TrainedKeys:
    """Which keys mean what: tensors below `prefixes` train, those that begin and end like this count steps."""

    prefixes: tuple[str, ...] = ("model/", "optimizer/")
    step_prefix: str = "optimizer/"
    step_suffix: str = "/step"

    def trains(self, key: str) -> bool:
        return key.startswith(self.prefixes)

    def counts(self, key: str) -> bool:
        return key.startswith(self.step_prefix) and key.endswith(self.step_suffix)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one rank has seen in its part of a state; `broken` are keys with their numbers of NaN and infinities."""

    broken: tuple[tuple[str, int], ...] = ()
    optimizer_step: float | None = None


@dataclass(frozen=True, kw_only=True)
class StateSummary:
    """One state as far as it is judged: the trainer's step, the optimizer's highest, fingerprints of what trains."""

    step: int
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
    if made == expected or before is None or math.isnan(made):  # a NaN is told as one
        return None
    return f"since step {before.step} the trainer counts {expected} steps, the optimizer {made:g}"


def skipped(now: StateSummary, before: StateSummary | None) -> bool:
    """Whether the optimizer has taken some of the trainer's steps and left others out."""
    made, expected = _moved(now, before)
    return 0 < made < expected


def _moved(now: StateSummary, before: StateSummary | None) -> tuple[float, float]:
    """Steps that the optimizer and the trainer have counted since; none of either when one of them does not count."""
    if before is None or now.optimizer_step is None or before.optimizer_step is None:
        return 0.0, 0.0
    return now.optimizer_step - before.optimizer_step, now.step - before.step


def _stale(now: StateSummary, before: StateSummary | None) -> str | None:
    if before is None or now.step <= before.step or not now.fingerprints:
        return None
    if dict(now.fingerprints) != dict(before.fingerprints):
        return None
    return f"all {len(now.fingerprints)} tensors that train are the same as at step {before.step}"
