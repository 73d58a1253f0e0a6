"""Smaller worlds: possible sizes, the size of the next attempt, and when to give up a wait for nodes. Pure."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.costs.micro_batches import micro_batch_size, takes
from trainer.parallel.data import Strategy
from trainer.parallel.expert import can_share_experts
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.time_spans import span


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """Nodes of one attempt; `overrides` are the config keys in which it differs from the run."""

    nodes: int
    spare_nodes: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def all_nodes(self) -> int:
        """Number of nodes requested from the scheduler."""
        return self.nodes + self.spare_nodes


def full_size(config: JobConfig) -> WorldSize:
    """Return the size that the run itself requests."""
    return WorldSize(nodes=config.cluster.nodes, spare_nodes=config.cluster.spare_nodes)


def world_sizes(config: JobConfig) -> tuple[WorldSize, ...]:
    """Return the possible sizes of an attempt, largest first: full, with fewer spare nodes, with fewer nodes.

    Only the full size is possible if `cluster.min_nodes` is 0.
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


def smaller_world(config: JobConfig, nodes: int) -> WorldSize | None:
    """Return the size for this smaller number of nodes with the same batch; None if it does not divide evenly.

    A rank has no more sequences in a forward pass than in the full world; tensor, context, expert and pipeline
    parallelism stay unchanged.
    """
    ranks, idle = divmod(nodes * config.cluster.ranks_per_node, config.parallel.ranks_per_share)
    if idle or config.train.batch_size % ranks:
        return None
    parallel = _smaller_mesh(config, ranks)
    size = _micro(config, config.train.batch_size // ranks)
    if parallel is None or size is None:
        return None
    overrides = {"cluster.nodes": nodes, "cluster.spare_nodes": 0, "train.micro_batch_size": size}
    return WorldSize(nodes=nodes, overrides=overrides | {f"parallel.{key}": value for key, value in parallel.items()})


def _micro(config: JobConfig, share: int) -> int | None:
    """Return the largest divisor of a rank's share that is at most the full world's micro-batch size.

    Returns None if the pipeline does not accept that number of micro-batches.
    """
    train, pipeline = config.train, config.parallel.pipeline
    most = micro_batch_size(pipeline, train, config.parallel.data_parallel_size(config.cluster.world_size))
    for size in range(min(most, share), 0, -1):
        count, rest = divmod(share, size)
        fits = pipeline.stages == 1 or (takes(pipeline, count) and pipeline.micro_batches in (0, count))
        if not rest and fits:
            return size
    return None


def _smaller_mesh(config: JobConfig, ranks: int) -> dict[str, Any] | None:
    """Return the changes in `parallel` for this number of data-parallel ranks. Replicas shrink before shards."""
    parallel = config.parallel
    full = parallel.mesh_sizes(config.cluster.world_size)
    shared = parallel.ranks_per_share // parallel.pipeline.ranks
    for shards in range(min(full["dp_shard"], ranks), 0, -1):
        replicas, rest = divmod(ranks, shards)
        if replicas > full["dp_replicate"]:
            return None  # fewer shards would need even more replicas
        if not rest and can_share_experts(config, shards * shared, parallel.ep):
            return _mesh_overrides(parallel, replicas, shards)
    return None


def _mesh_overrides(parallel: ParallelConfig, replicas: int, shards: int) -> dict[str, Any]:
    """Return the keys to set for this mesh; unset sizes stay unset."""
    changes: dict[str, Any] = {}
    if parallel.dp_replicate > 1 and replicas != parallel.dp_replicate:
        changes["dp_replicate"] = replicas
    if parallel.strategy == Strategy.HSDP and replicas == 1:
        changes["strategy"] = str(Strategy.FSDP)  # one group of shards is FSDP
    if parallel.strategy != Strategy.DDP and parallel.dp_shard not in (0, shards):
        changes["dp_shard"] = shards
    return changes


def resize_config(data: dict[str, Any], size: WorldSize) -> dict[str, Any]:
    """Return the run's resolved config with the overrides of this size."""
    changed = copy.deepcopy(data)
    for key, value in size.overrides.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = value
    return changed


def fitting_nodes(config: JobConfig) -> Iterator[int]:
    """Yield every node count below `cluster.nodes` at which the run could train with the same batch, largest first."""
    return (nodes for nodes in range(config.cluster.nodes - 1, 0, -1) if smaller_world(config, nodes) is not None)


NODES, SPARES = "nodes", "spare_nodes"
FULL_NODES, FULL_SPARES = "of", "of_spare_nodes"  # nodes and spare nodes that the run itself requests
BASE = "base"  # digest of the run's config, from which the attempt's config was derived


def choose_smaller_world(mine: Mapping[str, Any], full: Mapping[str, Any], base: str, reason: str) -> dict[str, Any]:
    """Describe a smaller world from the `cluster` sections of both configs."""
    return {
        NODES: int(mine.get("nodes", 1)),
        SPARES: int(mine.get("spare_nodes", 0)),
        FULL_NODES: int(full.get("nodes", 1)),
        FULL_SPARES: int(full.get("spare_nodes", 0)),
        "reason": reason,
        BASE: base,
    }


def asked_nodes(world: Mapping[str, Any]) -> int:
    """Return the number of nodes that a smaller attempt requested."""
    return int(world[NODES]) + int(world[SPARES])


def on_nodes(world: Mapping[str, Any]) -> str:
    """Return e.g. `on 3 of 4 nodes: 1 node was missing for 1h01m (recovery.patience=3600)`."""
    if world[NODES] < world[FULL_NODES]:
        return f"on {world[NODES]} of {_count(world[FULL_NODES])}: {world['reason']}"
    return f"with {world[SPARES]} of {_count(world[FULL_SPARES], 'spare node')}: {world['reason']}"


def size_words(number: int, world: Mapping[str, Any] | None) -> str:
    """Return `on_nodes` with the attempt, e.g. `attempt 3 runs on 3 of 4 nodes: ...`; empty for a full-size attempt."""
    return f"attempt {number} runs {on_nodes(world)}" if world else ""


def _count(count: int, noun: str = "node") -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class LastAttempt:
    """Size of the run's newest attempt, and how it ended."""

    asked: int  # requested nodes, including spares
    kind: FailureKind | None = None
    reason: str = ""  # the failure's reason
    refused_for: float = 0.0  # seconds since the scheduler began to reject jobs of this size


def give_up_waiting(
    sizes: Sequence[WorldSize], asked: int, waited: float, patience: float, usable: int | None
) -> str:  # fmt: skip
    """Return why a job that waits for `asked` nodes must be replaced by a smaller one; empty if it must not.

    `sizes` is ordered largest first. `waited` and `patience` are in seconds. `usable` is the number of nodes in service
    that are not excluded, including busy nodes; None if the scheduler cannot report it.
    """
    # A smaller job would wait just as long unless it fits.
    fits = _fits([size for size in sizes if size.all_nodes < asked], usable)
    return (
        ""
        if waited < patience or not fits
        else f"{_missing(asked, usable)} for {span(waited)} (recovery.patience={patience:g})"
    )


def _missing(asked: int, usable: int | None) -> str:
    if usable is None or usable >= asked:
        return f"{_count(asked)} {'was' if asked == 1 else 'were'} not free"
    return f"{_count(asked - usable)} {'was' if asked - usable == 1 else 'were'} missing"


def needs_choice(sizes: Sequence[WorldSize], last: LastAttempt) -> bool:
    """Return whether the nodes in service matter: after most full-size attempts the next one is full-size too."""
    shrinks = last.kind in (FailureKind.NODES_MISSING, FailureKind.SUBMIT_DEFERRED)
    return len(sizes) > 1 and (shrinks or last.asked < sizes[0].all_nodes)


def next_size(
    sizes: Sequence[WorldSize], last: LastAttempt, usable: int | None, patience: float
) -> tuple[WorldSize, str]:
    """Return the size of the attempt after `last`, and the reason unless the run was never smaller.

    `sizes`, `usable` and `patience` have the same meaning as in `give_up_waiting`.
    """
    full = sizes[0]
    # The last attempt ended for lack of nodes. The next one requests fewer, whatever is free now.
    if last.kind is FailureKind.NODES_MISSING:
        smaller = [size for size in sizes if size.all_nodes < last.asked] or [sizes[-1]]
        return _largest(smaller, usable), last.reason
    # If nodes have left the partition, a job of this size is not even queued.
    short = last.kind is FailureKind.SUBMIT_DEFERRED and usable is not None and usable < last.asked
    if short and last.refused_for >= patience and _fits(sizes, usable):
        lasts = f"{_missing(last.asked, usable)} for {span(last.refused_for)}, and a job of this size is refused"
        return _largest(sizes, usable), f"{lasts} (recovery.patience={patience:g})"
    # Recently lost nodes may return within `recovery.patience`.
    if last.asked >= full.all_nodes or len(sizes) == 1:
        return full, ""
    size = full if usable is None else _largest(sizes, usable)
    if size is full:
        in_service = "" if usable is None else f": Slurm has {_count(usable)} in service"
        return full, f"all {_count(full.all_nodes)} again{in_service}"
    missing = full.all_nodes - (usable or 0)
    return size, f"{_count(missing)} {'is' if missing == 1 else 'are'} still missing"


def _fits(sizes: Sequence[WorldSize], usable: int | None) -> bool:
    return bool(sizes) and (usable is None or sizes[-1].all_nodes <= usable)


def _largest(sizes: Sequence[WorldSize], usable: int | None) -> WorldSize:
    """Return the largest size that fits, else the smallest, which can start soonest."""
    return next((size for size in sizes if usable is None or size.all_nodes <= usable), sizes[-1])
