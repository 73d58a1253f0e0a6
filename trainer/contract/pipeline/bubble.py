"""PURE: the bubble, which is the share of a step for which a rank of a pipeline waits for others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def formula(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (m + p - 1) of `gpipe` and `1f1b` with equal stages; with v stages on each rank, v x m for m.

    Huang et al. 2019, section 2.1; Narayanan et al. 2021, section 2.2, which gives it as a share of the work.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """What one rank of a pipeline did in one step, in seconds; the mappings are by stage."""

    span: float
    """From the begin of the step to the end of the rank's last computation."""
    computed: Mapping[int, float]
    waited: Mapping[int, float]
    """Waiting for activations or gradients that this stage needs."""
    sends: float = 0.0
    """Waiting at the end of the step until other stages had taken what was sent."""
    reductions: float = 0.0
    """In the reduction of gradients over the data-parallel ranks of a stage."""


def bubbles(ranks: Sequence[RankSeconds]) -> list[float]:
    """The bubble of each rank of a pipeline.

    A rank waits in receives, and after its last computation for the rank that ends last: all begin a step together.
    """
    longest = max((rank.span for rank in ranks), default=0.0)
    if not longest:
        return [0.0 for _ in ranks]
    return [(sum(rank.waited.values()) + longest - rank.span) / longest for rank in ranks]


def bubbles_of_stages(ranks: Sequence[RankSeconds]) -> dict[int, float]:
    """The share of the step that each stage made its rank wait in receives; without the end of the step."""
    longest = max((rank.span for rank in ranks), default=0.0)
    return {stage: seconds / longest for rank in ranks for stage, seconds in rank.waited.items() if longest}
