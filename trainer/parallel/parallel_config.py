"""Configuration of parallelism, assembled from the sections of all dimensions, and the resulting meshes."""

import math
from dataclasses import dataclass

from trainer.parallel.context import CONTEXT, ContextSection
from trainer.parallel.data import DATA, DataSection, Strategy
from trainer.parallel.dimension import Dimension, Section, Splits, locate_rank
from trainer.parallel.expert import EXPERT, ExpertSection
from trainer.parallel.pipeline import PIPELINE, PipelineSection
from trainer.parallel.tensor import TENSOR, TensorSection

DIMENSIONS: tuple[Dimension, ...] = (
    PIPELINE,
    DATA,
    EXPERT,
    CONTEXT,
    TENSOR,
)
"""Dimensions in mesh order, outermost first: tensor-parallel ranks are neighbours, so that they stay within a node.

The built-in model is divided in the reverse order.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(
    ExpertSection,
    PipelineSection,
    ContextSection,
    TensorSection,
    DataSection,
):
    """Layout of the ranks; the product of the sizes is the world size."""

    def __post_init__(self) -> None:
        for section in reversed(type(self).__mro__):
            if issubclass(section, Section) and "check" in vars(section):
                section.check(self)

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """Return all sizes with defaults filled in. Raises ValueError if their product is not `world_size`."""
        data_ranks = max(1, world_size // self.ranks_per_share)
        sizes: dict[str, int] = {}
        words: list[str] = []
        for dimension in DIMENSIONS:
            part = dimension.mesh(self, data_ranks)
            sizes |= part
            words += [text for name, size in part.items() if (text := dimension.describe(name, size))]
        if (product := math.prod(sizes.values())) != world_size:
            words.sort(key=lambda text: "=" not in text)
            raise ValueError(
                f"parallel.{' x '.join(words)} = {product}, but cluster.nodes x cluster.ranks_per_node = {world_size}"
            )
        return sizes

    def parameter_sizes(self, world_size: int) -> dict[str, int]:
        """Return the mesh of parameters: ranks that share a sequence shard parameters, or replicate them with `ddp`."""
        sizes = self.mesh_sizes(world_size)
        for dimension in DIMENSIONS:
            if dimension.splits is Splits.SEQUENCE:
                sizes["dp_replicate" if self.strategy == Strategy.DDP else "dp_shard"] *= sizes.pop(dimension.name)
        return sizes

    @property
    def ranks_per_share(self) -> int:
        """Return the number of ranks that read the same share of every batch."""
        shared = (Splits.LAYERS, Splits.SEQUENCE, Splits.MATRICES)
        return math.prod(dimension.size(self) for dimension in DIMENSIONS if dimension.splits in shared)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that read different data."""
        sizes = self.mesh_sizes(world_size)
        return sizes["dp_replicate"] * sizes["dp_shard"]

    def place_words(self, world_size: int, rank: int) -> str:
        """Describe the position of `rank` in dimensions with several ranks; empty for plain data parallelism."""
        sizes = self.mesh_sizes(world_size)
        words = [f"{name} {at}" for name, at in locate_rank(sizes, rank).items() if sizes[name] > 1]
        words += [place for dimension in DIMENSIONS if (place := dimension.place(rank, self))]
        return "" if self.ranks_per_share == 1 and len(words) < 2 else ", ".join(words)

    def locate_work(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Return a value shared by ranks that compute the same part of the model for different sequences."""
        place = locate_rank(self.mesh_sizes(world_size), rank)
        return tuple(place[one.name] for one in DIMENSIONS if one.name in place)

    @property
    def sends_messages(self) -> bool:
        """Return whether ranks wait for messages from individual ranks, and not only in collectives."""
        return any(dimension.sends_messages and dimension.size(self) > 1 for dimension in DIMENSIONS)
