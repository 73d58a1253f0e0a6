"""Verdict on a user's program whose loss is NaN or infinite. Pure.

A single unusable loss may be a step that mixed precision skips, so several in a row are required, and two witnesses:
the losses of two ranks, or a rank's loss and its log. A rank whose loss is finite contradicts them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from trainer.protocol.messages.agents import LossRow

LEAST = 8
"""Number of unusable losses in a row that a rank must have reported."""
_SHOWN = 8

_LOSS = re.compile(
    r"loss\b['\"]?[\s:=(]{0,8}(?:tensor\(\s{0,4})?(?P<value>[-+]?(?:nan|inf(?:inity)?\b|\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+))",
    re.IGNORECASE,
)
"""A loss in a line of a log: `loss: nan`, `loss=0.25`, `{'loss': 2.5}`."""


@dataclass(frozen=True, kw_only=True)
class RankLosses:
    """Losses of one rank."""

    rank: int
    unusable: int
    since: int  # step of the first unusable loss
    finite_until: float  # seconds since the epoch; 0: never in this generation


@dataclass(frozen=True, kw_only=True)
class LossVerdict:
    """The program's loss is unusable."""

    step: int
    reason: str
    finite_until: float
    ranks: tuple[RankLosses, ...]

    def to_json(self) -> dict[str, object]:
        return {"schema": "orch.losses/1", **asdict(self)}


def shows_unusable_loss(log: str) -> bool:
    """Return whether the newest loss in a log is NaN or infinite."""
    found = _LOSS.findall(log)
    return bool(found) and found[-1].lstrip("+-")[:3].lower() in ("nan", "inf")


class BadLosses:
    """The newest losses of every rank in one generation."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankLosses] = {}

    def add_report(self, rows: Iterable[LossRow]) -> None:
        """Add the rows of ranks that know their loss."""
        for rank, unusable, since, finite_until in rows:
            self._ranks[rank] = RankLosses(rank=rank, unusable=unusable, since=since, finite_until=finite_until)

    def is_suspect(self) -> bool:
        """Return whether a rank has reported enough unusable losses, and no rank a finite one since."""
        seen = self._ranks.values()
        return any(one.unusable >= LEAST for one in seen) and all(one.unusable for one in seen)

    def judge(self, read_log: Callable[[int], str]) -> LossVerdict | None:
        """Return the verdict if two witnesses agree. `read_log` returns the newest output of a rank."""
        bad = sorted((one for one in self._ranks.values() if one.unusable >= LEAST), key=lambda one: one.rank)
        if not self.is_suspect():
            return None
        if len(bad) > 1:
            witnesses = _name_ranks(bad)
        elif shows_unusable_loss(read_log(bad[0].rank)):
            witnesses = f"rank {bad[0].rank} and its log"
        else:
            return None
        step, count = min(one.since for one in bad), min(one.unusable for one in bad)
        reason = f"the loss has been NaN or infinite since step {step}, {count} times in a row: {witnesses}"
        return LossVerdict(
            step=step, reason=reason, finite_until=min(one.finite_until for one in bad), ranks=tuple(bad)
        )


def _name_ranks(bad: Sequence[RankLosses]) -> str:
    names = ", ".join(str(one.rank) for one in bad[:_SHOWN])
    return f"ranks {names}" + (f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
