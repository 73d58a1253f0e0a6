"""What ranks.json says of ranks, from what the coordinator judges them by."""

from collections.abc import Mapping, Sequence

from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.rank_readings import RankReading, RankReadings

MOST = 64
"""Ranks that are listed; of a larger job, the slow ones and those that have stood still longest."""


def rank_readings(
    seen: Sequence[RankSample], *, world: int, time: float, generation: int, p99: Mapping[str, float],
    ratios: Mapping[int, float], command: bool = False,
) -> RankReadings:  # fmt: skip
    """One reading of some of `world` ranks; `ratios` has those whose own work takes longer than that of their peers.

    `command`: they are a user's own program, of which neither step nor phase nor a sign of life is known.
    """
    ranks = tuple(
        RankReading(
            rank=one.rank, node=one.node, step=None if command else one.step,
            phase="command" if command else one.phase, age=None if command else round(one.age, 1),
            state=one.state, ratio=ratios.get(one.rank), ended=one.ended,
            moment="" if one.moment is None else str(one.moment),
        )
        for one in sorted(seen, key=lambda one: one.rank)
    )  # fmt: skip
    return RankReadings(generation=generation, world=world, ranks=ranks, time=time, p99=p99)
