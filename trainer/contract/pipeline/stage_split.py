"""PURE: which layers each stage has, so that the slowest stage is as fast as can be."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from trainer.contract.pipeline.layer_costs import LayerCosts

StageCost = Callable[[int, int, int], float]
"""Of a stage with the layers from one number to before another."""


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """Layers `first` to `end` - 1 of the model; the first stage has the embedding too, the last one the output."""

    stage: int
    stages: int
    first: int
    end: int
    cost: float

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


@dataclass(frozen=True, kw_only=True)
class Split:
    """All stages of a model, in its order."""

    parts: tuple[StagePart, ...]

    @property
    def imbalance(self) -> float:
        """The most that a stage costs over the mean: the rate of a pipeline is that of its slowest stage."""
        costs = [part.cost for part in self.parts]
        return max(costs) * len(costs) / sum(costs)

    @property
    def words(self) -> str:
        """For a log: `4 stages of layers 0-2, 3-5, 6-8, 9-10; the slowest costs 1.08 times the mean`."""
        ranges = ", ".join(_range(part) for part in self.parts)
        return f"{len(self.parts)} stages of layers {ranges}; the slowest costs {self.imbalance:.2f} times the mean"


def split(costs: LayerCosts, stages: int) -> Split:
    """Every stage has one layer or more; raises ValueError for more stages than layers.

    Of all splits with the least cost of the slowest stage, the one with the least sum of squares; of several of these
    the one whose early stages have more layers.
    """
    count = len(costs.layers)
    if stages > count:
        raise ValueError(
            f"parallel.pipeline.stages={stages}: each needs a layer, but model.layers={count}: "
            f"type parallel.pipeline.stages={count}, or model.layers={stages}"
        )
    sums = list(accumulate(costs.layers, initial=0.0))

    def cost(stage: int, first: int, end: int) -> float:
        more = (costs.embedding if stage == 0 else 0.0) + (costs.output if stage == stages - 1 else 0.0)
        return sums[end] - sums[first] + more

    limit = _least(stages, count, cost, max, float("inf"))[0]
    # Sums of floats in another order differ in their last bits.
    _, ends = _least(stages, count, cost, lambda total, one: total + one * one, limit * (1 + 1e-9))
    firsts = [0, *ends[:-1]]
    return Split(
        parts=tuple(
            StagePart(stage=stage, stages=stages, first=first, end=end, cost=cost(stage, first, end))
            for stage, (first, end) in enumerate(zip(firsts, ends, strict=True))
        )
    )


def _least(
    stages: int, count: int, cost: StageCost, join: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """The least total of all splits whose stages cost at most `limit`, and where their stages end.

    By stage and end: the best split of the layers before it into the stages up to this one.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        found: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            ways = [
                (join(total, one), first, ends)
                for first, (total, ends) in best.items()
                if first < end and (one := cost(stage, first, end)) <= limit
            ]
            if ways:
                total, _, ends = min(ways, key=lambda way: (way[0], -way[1]))
                found[end] = (total, [*ends, end])
        best = found
    return best[count]


def _range(part: StagePart) -> str:
    return f"{part.first}" if part.end == part.first + 1 else f"{part.first}-{part.end - 1}"
