"""What flight records say: the culprits, each with its kind and reason, and how they are put into words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.agent.flight.flight_record import ON_HOST

Kind = Literal["none", "missing", "gpu_stopped", "desync_shape", "desync_order", "stuck_together"]
_NAMED = 8
"""Ranks named one by one in a reason."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """One rank for which others wait and whom nobody else explains."""

    rank: int
    kind: Literal["never_came", "no_answer", "gpu_stopped", "queued", "desync"]
    group: str
    sequence: int  # 0: a message
    reason: str

    @property
    def on_gpu(self) -> bool:
        """Its GPU stopped: where its host stands says nothing."""
        return self.kind in ("gpu_stopped", "queued")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the records say. `ranks` are the culprits; for `stuck_together` those that are inside and do not get on."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    reason: str
    queued: bool = False  # the culprits have called it, and their GPUs have not come to it
    culprits: tuple[Culprit, ...] = ()  # each by itself, where each is a root of its own
    chain: str = ""  # who waits for whom, from the end of the longest chain to its root

    @property
    def on_host(self) -> bool:
        """Whether it is a collective of host memory in a job that has GPUs."""
        return self.group.endswith(ON_HOST)


def wait_word(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1, 2 and 5", "1,023 ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks):,} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
