"""Data parallelism: replicas and shards of the model, each with its own part of every batch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainer.parallel.dimension import Dimension, Recipe, Section, Splits, check_size, join_alternatives
from trainer.protocol.config_sections.recipe_config import TrainConfig


class Strategy(StrEnum):
    """Data-parallel strategies: replicated and sharded states."""

    AUTO = "auto"  # `hsdp` if `dp_replicate` is above 1, else `fsdp`
    DDP = "ddp"  # no sharding: every rank has the whole model, and gradients are averaged
    ZERO1 = "zero1"  # shards optimizer state; gradients of all micro-batches are accumulated before the reduction
    ZERO2 = "zero2"  # shards gradients and optimizer state; parameters are gathered once per step
    ZERO3 = "zero3"  # shards parameters, gradients and optimizer state; parameters are gathered layer by layer
    FSDP = "fsdp"  # same as zero3
    HSDP = "hsdp"  # zero3 within each of `dp_replicate` groups, whose gradients are averaged


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
"""Minimum bytes of parameters that an optimizer in host memory copies at a time."""
RESHARD = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """FSDP settings; `reduce` and `wrap` change the last bits of results, the others change nothing."""

    reshard_after_forward: str = "auto"
    """`always` frees a layer's parameters after its forward pass, `never` keeps them for the backward pass; `auto`:
    `never` with `ddp`, `zero1` and `zero2`, else all but the root."""

    prefetch: int = 0
    """Number of layers gathered ahead of the current one. 0 means torch's default of one layer."""

    reduce: str = Reduce.AUTO
    """Reduce gradients after `each` micro-batch, or after the `last` of a step: less traffic, but whole gradients in
    memory. `auto`: `last` with `ddp` and `zero1`, else `each`."""

    offload: str = Offload.NONE
    """State kept in host memory: `none`; `optimizer`: the optimizer's state, and the optimizer runs there; `all`: also
    shards of parameters and gradients."""

    wrap: str = "auto"
    """Modules gathered and freed together: class names (`Block,FeedForward`), a number (modules with at least that many
    parameters), or `auto`: each layer."""

    def __post_init__(self) -> None:
        if self.offload not in set(Offload):
            raise ValueError(f"parallel.fsdp.offload={self.offload}: must be {join_alternatives(tuple(Offload))}")
        if self.reduce not in set(Reduce):
            raise ValueError(f"parallel.fsdp.reduce={self.reduce}: must be {join_alternatives(tuple(Reduce))}")
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
                f"{join_alternatives(RESHARD)}"
            )
        if self.prefetch < 0:
            raise ValueError(f"parallel.fsdp.prefetch={self.prefetch}: must be 0 or a number of layers")

    @property
    def on_host(self) -> tuple[str, ...]:
        """Return the names of the states kept in host memory while ranks train on GPUs."""
        return _ON_HOST[Offload(self.offload)]


_ON_HOST = {Offload.NONE: (), Offload.OPTIMIZER: ("optimizer",), Offload.ALL: ("parameters", "gradients", "optimizer")}


ONE_GROUP = (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP)
"""Strategies without replicas: all data-parallel ranks share one copy."""


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """Config keys for data parallelism."""

    strategy: str = Strategy.AUTO
    """`ddp`, `zero1`, `zero2`, `zero3`, `fsdp`, `hsdp`; `auto`: `hsdp` if `dp_replicate` is above 1, else `fsdp`."""

    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP when above 1); `ddp` uses all data-parallel ranks."""

    dp_shard: int = 0
    """Ranks that share parameters, gradients and optimizer state (FSDP). 0 means all remaining, or one with `ddp`."""

    fsdp: FsdpConfig = field(default_factory=FsdpConfig)

    def check(self) -> None:
        if self.strategy not in set(Strategy):
            raise ValueError(f"parallel.strategy={self.strategy}: must be {join_alternatives(tuple(Strategy))}")
        check_size("dp_replicate", self.dp_replicate)
        check_size("dp_shard", self.dp_shard, 0)

    @property
    def reshard_after_forward(self) -> bool | None:
        """Return the argument for `fully_shard`; None means all units but the root."""
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


def batch_problems(train: TrainConfig, ranks: int) -> list[str]:
    """Check that each of `ranks` data-parallel ranks gets an equal share of every batch."""
    if train.batch_size % ranks:
        return [
            f"train.batch_size={train.batch_size}: must be a multiple of the {ranks} data-parallel ranks "
            "(parallel.dp_replicate x dp_shard)"
        ]
    share, micro = train.batch_size // ranks, train.micro_batch_size
    if micro and share % micro:
        return [f"train.micro_batch_size={micro}: must divide the {share} sequences of each data-parallel rank"]
    return []


class DataParallelism(Dimension):
    """Replicas and shards; parameter shards are gathered layer by layer (FSDP2), or gradients averaged (DDP)."""

    name, key, splits = "dp", "dp_shard", Splits.BATCH
    torch_module = "data_parallel"

    def mesh(self, parallel: Any, data_ranks: int) -> dict[str, int]:
        replicas = parallel.dp_replicate
        if parallel.strategy == Strategy.DDP:
            return {"dp_replicate": replicas if replicas > 1 else data_ranks, "dp_shard": 1}
        return {"dp_replicate": replicas, "dp_shard": parallel.dp_shard or max(1, data_ranks // replicas)}

    def describe(self, name: str, size: int) -> str:
        return f"{name}={size}"

    def problems(self, job: Recipe) -> Iterator[str]:
        """Yield conflicts between strategy and sizes, regardless of the world size."""
        parallel: DataSection = job.parallel
        if parallel.strategy in ONE_GROUP and parallel.dp_replicate > 1:
            yield f"parallel.strategy={parallel.strategy} has one replica, but dp_replicate={parallel.dp_replicate}"
        if parallel.strategy == Strategy.HSDP and parallel.dp_replicate == 1:
            yield "parallel.strategy=hsdp needs 2 replicas or more, but dp_replicate=1"
        if parallel.strategy == Strategy.DDP and parallel.dp_shard > 1:
            yield f"parallel.strategy=ddp shards nothing, but dp_shard={parallel.dp_shard}"


DATA = DataParallelism()
