"""Configuration of parallelism: strategy, mesh, pipeline and experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Schedule(StrEnum):
    """Order in which a stage computes the forward and backward passes of a step's micro-batches."""

    GPIPE = "gpipe"  # all forward passes, then all backward passes (Huang et al. 2019)
    ONE_F_ONE_B = "1f1b"  # alternating forward and backward: fewer activations (Narayanan et al. 2019)
    INTERLEAVED = "interleaved_1f1b"  # the same with several stages per rank (Narayanan et al. 2021)
    ZERO_BUBBLE = "interleaved_zero_bubble"  # ZB1P: weight gradients are computed in idle time (Qi et al. 2023)
    ZBV = "zbv"  # zero bubble with two stages per rank that form a V


ZERO_BUBBLE = (Schedule.ZERO_BUBBLE, Schedule.ZBV)
"""Schedules that compute weight gradients separately from activation gradients."""
LARGE_ROUNDS = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
"""Schedules that process micro-batches in rounds of equal size, at least the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism: ranks hold consecutive layers of the model."""

    stages: int = 1
    """Consecutive parts of the layers, `stages_per_rank` of them on each rank of the pipeline; 1: no pipeline."""

    schedule: str = Schedule.ONE_F_ONE_B
    """`gpipe`, `1f1b`, `interleaved_1f1b`, `interleaved_zero_bubble` or `zbv`."""

    stages_per_rank: int = 0
    """Stages on each rank; 0: one with `gpipe` and `1f1b`, else two."""

    micro_batches: int = 0
    """Micro-batches per step on each data-parallel rank; 0: by `train.micro_batch_size`, or at least four times the
    ranks of the pipeline if a rank's share divides accordingly."""

    layer_seconds: tuple[float, ...] = ()
    """Measured seconds of the embedding, of each layer, and of the output with its loss, to split the layers by; empty:
    modelled FLOPs."""

    def __post_init__(self) -> None:
        if self.schedule not in set(Schedule):
            *others, last = Schedule
            raise ValueError(
                f"parallel.pipeline.schedule={self.schedule}: must be {', '.join(others)} or {last}: "
                f"type parallel.pipeline.schedule={Schedule.ONE_F_ONE_B}"
            )
        for name, least in (("stages", 1), ("stages_per_rank", 0), ("micro_batches", 0)):
            if (size := getattr(self, name)) < least:
                raise ValueError(
                    f"parallel.pipeline.{name}={size}: must be at least {least}: type parallel.pipeline.{name}={least}"
                )
        if any(not 0 <= seconds < float("inf") for seconds in self.layer_seconds):
            raise ValueError(
                "parallel.pipeline.layer_seconds: must be numbers of seconds, 0 or more: "
                "type ~parallel.pipeline.layer_seconds"
            )
        if self.stages > 1:
            self._check_stages_per_rank()
            self._check_stages()

    def _check_stages_per_rank(self) -> None:
        least, most = _STAGES_PER_RANK[Schedule(self.schedule)]
        if least <= self.per_rank <= most:
            return
        needs = f"{least}" if least == most else f"{least} or more"
        other = Schedule.ONE_F_ONE_B if self.per_rank == 1 else Schedule.INTERLEAVED
        raise ValueError(
            f"parallel.pipeline.stages_per_rank={self.per_rank}: schedule {self.schedule} has {needs} on each rank: "
            f"type parallel.pipeline.stages_per_rank={least}, or parallel.pipeline.schedule={other}"
        )

    def _check_stages(self) -> None:
        if self.stages % self.per_rank:
            below = self.stages // self.per_rank * self.per_rank
            sizes = [size for size in (below, below + self.per_rank) if size > self.per_rank]
            raise ValueError(
                f"parallel.pipeline.stages={self.stages}: must be a multiple of the {self.per_rank} stages of each "
                f"rank: type {' or '.join(f'parallel.pipeline.stages={size}' for size in sizes)}"
            )
        if self.ranks == 1:
            raise ValueError(
                f"parallel.pipeline.stages={self.stages} with {self.per_rank} on each rank is a pipeline of one rank: "
                f"type parallel.pipeline.stages={2 * self.per_rank}, or parallel.pipeline.stages=1 for no pipeline"
            )

    @property
    def per_rank(self) -> int:
        """Return the stages on each rank, with 0 resolved."""
        if self.stages == 1:
            return 1
        return self.stages_per_rank or (1 if self.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2)

    @property
    def ranks(self) -> int:
        """Return the size of the pipeline dimension of the mesh."""
        return self.stages // self.per_rank

    @property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are computed separately from activation gradients."""
        return self.stages > 1 and self.schedule in ZERO_BUBBLE


_ANY = 1 << 30
_STAGES_PER_RANK = {
    Schedule.GPIPE: (1, 1),
    Schedule.ONE_F_ONE_B: (1, 1),
    Schedule.INTERLEAVED: (2, _ANY),
    Schedule.ZERO_BUBBLE: (1, _ANY),
    Schedule.ZBV: (2, 2),
}


class Strategy(StrEnum):
    """Data-parallel strategies: replicated and sharded states."""

    AUTO = "auto"  # `hsdp` if `dp_replicate` is above 1, else `fsdp`
    DDP = "ddp"  # no sharding: every rank has the whole model, and gradients are averaged
    ZERO1 = "zero1"  # shards optimizer state; gradients of all micro-batches are accumulated before the reduction
    ZERO2 = "zero2"  # shards gradients and optimizer state; parameters are gathered once per step
    ZERO3 = "zero3"  # shards parameters, gradients and optimizer state; parameters are gathered layer by layer
    FSDP = "fsdp"  # same as zero3
    HSDP = "hsdp"  # zero3 within each of `dp_replicate` groups, whose gradients are averaged


class CpMethod(StrEnum):
    """Methods of context parallelism."""

    AUTO = "auto"  # `ulysses` if a rank's heads can be divided, else `ring`
    ULYSSES = "ulysses"  # each rank has all tokens of some heads: all-to-all before attention and back after it
    RING = "ring"  # each rank has some tokens of all heads: keys and values travel from rank to rank


class MeshSizes(NamedTuple):
    """Dimensions of the mesh, outermost first."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def place_words(sizes: MeshSizes, rank: int, ep: int = 1) -> str:
    """Return the place of `rank` in the dimensions that have several ranks; empty for plain data parallelism.

    `ep`: number of ranks that share experts; they are neighbours among the `dp_shard` x `cp` x `tp` ranks.
    """
    place = MeshSizes(*mesh_coordinates(sizes, rank))
    words = [f"{name} {at}" for name, size, at in zip(sizes._fields, sizes, place, strict=True) if size > 1]
    if ep > 1:
        words.append(f"ep {((place.dp_shard * sizes.cp + place.cp) * sizes.tp + place.tp) % ep}")
    data_alone = sizes.pp == sizes.cp == sizes.tp == 1
    return "" if data_alone and len(words) < 2 else ", ".join(words)


class ParameterSizes(NamedTuple):
    """Mesh over which parameters are placed; the ranks of a context-parallel group count as shards or replicas."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


class ExpertSizes(NamedTuple):
    """Mesh over which shared experts are placed; `dp_shard` ranks hold shards of the same experts."""

    pp: int
    dp_replicate: int
    dp_shard: int
    ep: int


def mesh_coordinates(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the index of `rank` in each dimension of a mesh, outermost first; the inner dimensions alone also work."""
    place: list[int] = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return tuple(reversed(place))


class Offload(StrEnum):
    """State kept in host memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"  # optimizer state: gradients are copied to the host and new parameters back
    ALL = "all"  # also shards of parameters and gradients


class Reduce(StrEnum):
    """When the gradients of a step with several micro-batches are reduced."""

    AUTO = "auto"  # `last` with `ddp` and `zero1`, else `each`
    EACH = "each"  # after each micro-batch: ranks keep gradient shards
    LAST = "last"  # after the last micro-batch: ranks keep whole gradients until then


HOST_COPY_BYTES = 64 << 20
"""Minimum bytes of parameters that an optimizer in host memory copies together."""
RESHARD = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """FSDP settings; `reduce` and `wrap` change last bits, the others do not change results."""

    reshard_after_forward: str = "auto"
    """`always` frees a layer's parameters after its forward pass, `never` keeps them for the backward pass; `auto`:
    `never` with `ddp`, `zero1` and `zero2`, else all but the root."""

    prefetch: int = 0
    """Layers gathered ahead of the one that computes; 0: torch's default, one."""

    reduce: str = Reduce.AUTO
    """Reduce gradients after `each` micro-batch, or after the `last` one of a step: less traffic, whole gradients in
    memory. `auto`: `last` with `ddp` and `zero1`, else `each`."""

    offload: str = Offload.NONE
    """Kept in host memory: `none`; `optimizer`: the optimizer's state, and the optimizer runs there; `all`: shards of
    parameters and gradients too."""

    wrap: str = "auto"
    """Modules gathered and freed together: class names (`Block,FeedForward`), a number (modules with at least so many
    parameters), or `auto`: each layer."""

    def __post_init__(self) -> None:
        if self.offload not in set(Offload):
            raise ValueError(f"parallel.fsdp.offload={self.offload}: must be {_join_alternatives(tuple(Offload))}")
        if self.reduce not in set(Reduce):
            raise ValueError(f"parallel.fsdp.reduce={self.reduce}: must be {_join_alternatives(tuple(Reduce))}")
        words = [word.strip() for word in self.wrap.split(",")]
        known = all(map(str.isidentifier, words)) and (len(words) == 1 or "auto" not in words)
        if not known and not self.wrap.isdecimal():
            raise ValueError(
                f"parallel.fsdp.wrap={self.wrap}: must be auto, a number of parameters, or names of classes "
                "(Block,FeedForward): type parallel.fsdp.wrap=auto"
            )
        if self.reshard_after_forward not in RESHARD:
            raise ValueError(
                f"parallel.fsdp.reshard_after_forward={self.reshard_after_forward}: must be "
                f"{_join_alternatives(RESHARD)}"
            )
        if self.prefetch < 0:
            raise ValueError(f"parallel.fsdp.prefetch={self.prefetch}: must be 0 or a number of layers")

    @property
    def on_host(self) -> tuple[str, ...]:
        """Return the names of the states kept in host memory while ranks train on GPUs."""
        return _ON_HOST[Offload(self.offload)]


_ON_HOST = {Offload.NONE: (), Offload.OPTIMIZER: ("optimizer",), Offload.ALL: ("parameters", "gradients", "optimizer")}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout of the ranks; the product of the sizes is the world size."""

    strategy: str = Strategy.AUTO
    """`ddp`, `zero1`, `zero2`, `zero3`, `fsdp`, `hsdp`; `auto`: `hsdp` if `dp_replicate` is above 1, else `fsdp`."""

    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP when above 1); `ddp` takes all data-parallel ranks."""

    dp_shard: int = 0
    """Ranks that share parameters, gradients and optimizer state (FSDP); 0: all remaining ranks, with `ddp` one."""

    tp: int = 1
    """Ranks that share each layer's matrices (tensor parallelism); they must divide `cluster.ranks_per_node`."""

    tp_across_nodes: bool = False
    """Allow a `tp` that spans several nodes: every layer then waits for the network between them."""

    cp: int = 1
    """Ranks that share each sequence (context parallelism, built-in model); they read the same batch."""

    cp_method: str = CpMethod.AUTO
    """Attention of `cp` ranks: `ulysses`, `ring`, or `auto` (`ulysses` if `cp` divides the heads of a rank, else
    `ring`)."""

    ep: int = 1
    """Ranks that share the experts of each layer (expert parallelism, built-in model), a subset of the `dp_shard` x
    `cp` x `tp` ranks."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)

    def __post_init__(self) -> None:
        if self.strategy not in set(Strategy):
            raise ValueError(f"parallel.strategy={self.strategy}: must be {_join_alternatives(tuple(Strategy))}")
        if self.cp_method not in set(CpMethod):
            raise ValueError(f"parallel.cp_method={self.cp_method}: must be {_join_alternatives(tuple(CpMethod))}")
        for name, least in (("dp_replicate", 1), ("dp_shard", 0), ("cp", 1), ("tp", 1), ("ep", 1)):
            if (size := getattr(self, name)) < least:
                raise ValueError(f"parallel.{name}={size}: must be at least {least}: type parallel.{name}={least}")

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """Return all sizes with defaults filled in; raises ValueError if their product is not `world_size`."""
        ranks = max(1, world_size // self.ranks_per_share)
        replicas, shards = self.dp_replicate, self.dp_shard or max(1, ranks // self.dp_replicate)
        if self.strategy == Strategy.DDP:
            replicas, shards = replicas if replicas > 1 else ranks, 1
        sizes = MeshSizes(self.pipeline.ranks, replicas, shards, self.cp, self.tp)
        if (product := math.prod(sizes)) != world_size:
            shown = [
                (name, size) for name, size in sizes._asdict().items() if name != "pp" and (name != "cp" or size > 1)
            ]
            words = " x ".join(f"{name}={size}" for name, size in shown)
            words += f" x {sizes.pp} ranks of a pipeline" if sizes.pp > 1 else ""
            raise ValueError(f"parallel.{words} = {product}, but cluster.nodes x cluster.ranks_per_node = {world_size}")
        return sizes

    def parameter_sizes(self, world_size: int) -> ParameterSizes:
        """Return the mesh of parameters: ranks that share a sequence shard parameters, or replicate them with `ddp`."""
        sizes = self.mesh_sizes(world_size)
        if self.strategy == Strategy.DDP:
            return ParameterSizes(sizes.pp, sizes.dp_replicate * sizes.cp, 1, sizes.tp)
        return ParameterSizes(sizes.pp, sizes.dp_replicate, sizes.dp_shard * sizes.cp, sizes.tp)

    def expert_sizes(self, world_size: int) -> ExpertSizes:
        """Return the mesh of expert stacks."""
        sizes = self.parameter_sizes(world_size)
        return ExpertSizes(sizes.pp, sizes.dp_replicate, self.expert_ranks(world_size) // self.ep, self.ep)

    def expert_ranks(self, world_size: int) -> int:
        """Return the number of ranks that share experts, or shards of them, if `ep` is above 1; includes `tp` ranks."""
        sizes = self.parameter_sizes(world_size)
        return sizes.dp_shard * sizes.tp

    def place_words(self, world_size: int, rank: int) -> str:
        """Describe the place of `rank` in the mesh; empty for plain data parallelism."""
        return place_words(self.mesh_sizes(world_size), rank, self.ep)

    @property
    def ranks_per_share(self) -> int:
        """Return the number of ranks that read the same share of every batch."""
        return self.pipeline.ranks * self.cp * self.tp

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that read different data."""
        sizes = self.mesh_sizes(world_size)
        return sizes.dp_replicate * sizes.dp_shard

    @property
    def reshard_after_forward(self) -> bool | None:
        """Return the argument for `fully_shard`; None: all units but the root."""
        if self.fsdp.reshard_after_forward == "auto":
            return False if self.strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2) else None
        return self.fsdp.reshard_after_forward == "always"

    def has_plain_replicas(self, dtype: str) -> bool:
        """Return whether every rank holds the plain model, without a half-precision copy or a copy in host memory."""
        return self.strategy == Strategy.DDP and dtype == "float32" and self.fsdp.offload != Offload.ALL

    @property
    def reduce(self) -> Reduce:
        """Return when gradients are reduced, with `auto` resolved."""
        chosen = Reduce(self.fsdp.reduce)
        if chosen is Reduce.AUTO:
            return Reduce.LAST if self.strategy in (Strategy.DDP, Strategy.ZERO1) else Reduce.EACH
        return chosen


ONE_GROUP = (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP)
"""Strategies without replicas: all data-parallel ranks share one copy."""


def _join_alternatives(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
