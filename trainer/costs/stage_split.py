"""Splitting of layers into pipeline stages: costs, placement and parameters. Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from trainer.costs.model_flops import Parameter, attention_flops, attention_weights, feed_forward_weights
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig


def rank_of_stage(config: PipelineConfig, stage: int) -> int:
    """Return a stage's rank in the pipeline. Stages cycle through the ranks; `zbv` reverses every second cycle."""
    turn, place = divmod(stage, config.ranks)
    if config.schedule == Schedule.ZBV and turn % 2:
        return config.ranks - 1 - place
    return place


def stages_of_rank(config: PipelineConfig, rank: int) -> list[int]:
    """Return the stages of a rank in model order."""
    return [stage for stage in range(config.stages) if rank_of_stage(config, stage) == rank]


FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the cost of forward and backward passes.

The gradients of inputs and weights cost one product each, like the forward pass.
"""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of the forward and backward passes of one sequence, in FLOPs or seconds; only their ratios matter."""

    embedding: float
    layers: tuple[float, ...]
    output: float
    """Cost of the last norm, the projection to the vocabulary, and the loss."""

    @property
    def total(self) -> float:
        return self.embedding + sum(self.layers) + self.output


def modelled_costs(model: ModelConfig, train: TrainConfig) -> LayerCosts:
    """Return costs in FLOPs, counted as in `flops_per_token`, plus a second forward pass for recomputed layers."""
    weights = attention_weights(model) + feed_forward_weights(model)
    layer = 6.0 * weights + attention_flops(model, train.seq_len)
    return LayerCosts(
        embedding=0.0,
        layers=tuple(
            train.seq_len * layer * (1 + FORWARD_SHARE if _is_recomputed(number, train) else 1)
            for number in range(model.layers)
        ),
        output=train.seq_len
        * 6.0
        * model.dim
        * model.vocab_size
        * (1 if train.loss_chunks == 1 else 1 + FORWARD_SHARE),
    )


def measured_costs(seconds: tuple[float, ...], model: ModelConfig) -> LayerCosts:
    """Return costs from `parallel.pipeline.layer_seconds`. Raises ValueError if they do not fit the model."""
    if len(seconds) != model.layers + 2:
        raise ValueError(
            f"parallel.pipeline.layer_seconds has {len(seconds)} numbers: must have {model.layers + 2}, for the "
            f"embedding, each of model.layers={model.layers}, and the output with its loss"
        )
    if not sum(seconds):
        raise ValueError("parallel.pipeline.layer_seconds are all 0: at least one must be above 0")
    embedding, *layers, output = seconds
    return LayerCosts(embedding=embedding, layers=tuple(layers), output=output)


def _is_recomputed(number: int, train: TrainConfig) -> bool:
    return train.activation_checkpointing and number % train.recompute.every == 0


StageCost = Callable[[int, int, int], float]
"""Function from a stage's number, first layer and end layer (exclusive) to its cost."""


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """Layers `first` to `end` - 1 of the model; the first stage includes the embedding, the last one the output."""

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
    """All stages of a model, in order."""

    parts: tuple[StagePart, ...]

    @property
    def imbalance(self) -> float:
        """Return the highest stage cost divided by the mean: a pipeline runs at the rate of its slowest stage."""
        costs = [part.cost for part in self.parts]
        return max(costs) * len(costs) / sum(costs)

    @property
    def words(self) -> str:
        """Describe the split: `4 stages of layers 0-2, 3-5, 6-8, 9-10; the slowest costs 1.08 times the mean`."""
        ranges = ", ".join(_range(part) for part in self.parts)
        return f"{len(self.parts)} stages of layers {ranges}; the slowest costs {self.imbalance:.2f} times the mean"


def split(costs: LayerCosts, stages: int) -> Split:
    """Split the layers into stages with at least one layer each. Raises ValueError for more stages than layers.

    Minimizes the cost of the slowest stage, then the sum of squares, and then puts more layers into early stages.
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
    # Floating-point sums computed in a different order differ in their last bits.
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
    """Return the least total over splits whose stages cost at most `limit`, and the ends of its stages."""
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


def split_model(pipeline: PipelineConfig, model: ModelConfig, train: TrainConfig) -> Split:
    """Return the stages, split by measured seconds if given, else by modelled FLOPs. Raises ValueError."""
    seconds = pipeline.layer_seconds
    costs = measured_costs(seconds, model) if seconds else modelled_costs(model, train)
    return split(costs, pipeline.stages)


_OF_FIRST, _OF_LAST = "embedding.", ("norm.", "output.")


def has(part: StagePart, parameter: Parameter) -> bool:
    """Return whether a parameter belongs to this stage."""
    if parameter.name.startswith(_OF_FIRST):
        return part.is_first
    if parameter.name.startswith(_OF_LAST):
        return part.is_last
    return int(parameter.name.split(".")[1]) in part.layers
