"""PURE: the sizes at which a run can train with the same batch, from all its nodes down to `cluster.min_nodes`."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.run_config import RunConfig
from trainer.contract.config_sections.parallel_config import ParallelConfig, Strategy
from trainer.contract.layout.expert_parallel import can_share
from trainer.contract.pipeline.micro_batches import micro_batch_size, takes


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """Nodes of one attempt; `overrides` are the keys in which its config differs from the run's."""

    nodes: int
    spare_nodes: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def all_nodes(self) -> int:
        """What is asked of the scheduler."""
        return self.nodes + self.spare_nodes


def full_size(config: RunConfig) -> WorldSize:
    """What the run itself asks for."""
    return WorldSize(nodes=config.cluster.nodes, spare_nodes=config.cluster.spare_nodes)


def world_sizes(config: RunConfig) -> tuple[WorldSize, ...]:
    """The sizes that an attempt may have, largest first: the full one, with fewer spare nodes, with fewer nodes.

    Only the full one where `cluster.min_nodes` is 0.
    """
    cluster = config.cluster
    if not cluster.min_nodes:
        return (full_size(config),)
    fewer_spares = (
        WorldSize(nodes=cluster.nodes, spare_nodes=spares, overrides={"cluster.spare_nodes": spares})
        for spares in range(cluster.spare_nodes - 1, -1, -1)
    )
    smaller = (smaller_world(config, nodes) for nodes in range(cluster.nodes - 1, cluster.min_nodes - 1, -1))
    return (full_size(config), *fewer_spares, *(size for size in smaller if size is not None))


def smaller_world(config: RunConfig, nodes: int) -> WorldSize | None:
    """The run on so many nodes, fewer than its own, with the same batch; None where that does not divide.

    A rank has no more sequences in a forward pass than in the full world; tensor, context, expert and pipeline
    parallelism stay.
    """
    ranks, idle = divmod(nodes * config.cluster.ranks_per_node, config.parallel.ranks_per_share)
    if idle or config.train.batch_size % ranks:
        return None
    parallel = _smaller_mesh(config, ranks)
    if parallel is None:
        return None
    share = config.train.batch_size // ranks
    size = _micro(config, share)
    if size is None:
        return None
    overrides = {"cluster.nodes": nodes, "cluster.spare_nodes": 0, "train.micro_batch_size": size}
    return WorldSize(nodes=nodes, overrides=overrides | {f"parallel.{key}": value for key, value in parallel.items()})


def _micro(config: RunConfig, share: int) -> int | None:
    """The largest divisor of a rank's share that fits where a forward pass of the full world does.

    None where the pipeline cannot take so many micro-batches.
    """
    train, pipeline = config.train, config.parallel.pipeline
    most = micro_batch_size(pipeline, train, config.parallel.data_parallel_size(config.cluster.world_size))
    for size in range(min(most, share), 0, -1):
        count, rest = divmod(share, size)
        fits = pipeline.stages == 1 or (takes(pipeline, count) and pipeline.micro_batches in (0, count))
        if not rest and fits:
            return size
    return None


def _smaller_mesh(config: RunConfig, ranks: int) -> dict[str, Any] | None:
    """What changes in `parallel` for so many data-parallel ranks: no size grows, replicas shrink before shards."""
    parallel = config.parallel
    full = parallel.mesh_sizes(config.cluster.world_size)
    for shards in range(min(full.dp_shard, ranks), 0, -1):
        replicas, rest = divmod(ranks, shards)
        if replicas > full.dp_replicate:
            return None  # and fewer shards would need still more
        if not rest and can_share(config, shards * parallel.cp * parallel.tp, parallel.ep):
            return _changed(parallel, replicas, shards)
    return None


def _changed(parallel: ParallelConfig, replicas: int, shards: int) -> dict[str, Any]:
    """The keys that have to be set for this mesh; sizes that are left open stay open."""
    changes: dict[str, Any] = {}
    if parallel.dp_replicate > 1 and replicas != parallel.dp_replicate:
        changes["dp_replicate"] = replicas
    if parallel.strategy == Strategy.HSDP and replicas == 1:
        changes["strategy"] = str(Strategy.FSDP)  # one group of shards is FSDP
    if parallel.strategy != Strategy.DDP and parallel.dp_shard not in (0, shards):
        changes["dp_shard"] = shards
    return changes


def resized(data: dict[str, Any], size: WorldSize) -> dict[str, Any]:
    """The run's resolved config with the keys that this size changes."""
    changed = copy.deepcopy(data)
    for key, value in size.overrides.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = value
    return changed


def fitting_nodes(config: RunConfig) -> Iterator[int]:
    """Every number of nodes below `cluster.nodes` at which the run could train with the same batch, largest first."""
    return (nodes for nodes in range(config.cluster.nodes - 1, 0, -1) if smaller_world(config, nodes) is not None)
