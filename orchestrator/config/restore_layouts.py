"""PURE: layouts on which a checkpoint is restored, and the config values they imply."""

import math
from typing import Any

from orchestrator.config.restore_tests_config import SAME
from orchestrator.config.run_config import RunConfig
from trainer.protocol.config_sections.parallel_config import Strategy


def with_layout(data: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return the config sections that change on `layout`: `same`, `RANKS` or `NODESxRANKS`.

    Tensor, context and expert parallelism and replication are kept as far as they fit; pipeline parallelism is turned
    off, and the remaining ranks shard. The micro-batch size is kept, or reduced to a divisor of a rank's share.
    """
    cluster, parallel = dict(data["cluster"]), dict(data["parallel"])
    cluster |= {"spare_nodes": 0, "min_nodes": 0}
    more = {}
    if layout != SAME:
        nodes, ranks = nodes_and_ranks(layout)
        cluster |= {"nodes": nodes, "ranks_per_node": ranks, "gpus_per_node": ranks if cluster["gpus_per_node"] else 0}
        tp = math.gcd(parallel["tp"], ranks)
        cp = math.gcd(parallel.get("cp", 1), nodes * ranks // tp)
        left = nodes * ranks // (cp * tp)
        replicas = parallel["dp_replicate"] if left % parallel["dp_replicate"] == 0 else 1
        strategy = parallel.get("strategy", Strategy.AUTO)
        if strategy == Strategy.DDP:  # its single replica degree covers all ranks
            replicas = 1
        if strategy == Strategy.HSDP and replicas == 1:
            strategy = Strategy.AUTO
        if "pipeline" in parallel:
            parallel["pipeline"] = {**parallel["pipeline"], "stages": 1, "stages_per_rank": 0, "micro_batches": 0}
        ep = _ep(data, left // replicas * cp * tp)
        sizes = {"cp": cp, "tp": tp, "ep": ep, "dp_replicate": replicas, "dp_shard": 0}
        parallel |= {"strategy": str(strategy), **sizes}
        if "train" in data:
            more["train"] = {**data["train"], "micro_batch_size": _micro_batch_size(data["train"], left)}
    return {"cluster": cluster, "parallel": parallel, **more}


def _micro_batch_size(train: dict[str, Any], ranks: int) -> int:
    """Return the largest size, at most the configured one, that divides each of `ranks` equal shares of the batch."""
    asked: int = train["micro_batch_size"]
    share, rest = divmod(train["batch_size"], ranks)
    if rest or not asked:
        return asked
    return max(size for size in range(1, min(asked, share) + 1) if share % size == 0)


def _ep(data: dict[str, Any], sharding: int) -> int:
    """Return the largest divisor of the expert-parallel degree that fits `sharding` ranks and the experts' width."""
    asked = math.gcd(data["parallel"].get("ep", 1), sharding)
    width = data.get("model", {}).get("experts", {}).get("ffn_dim", 1)
    return next(ep for ep in range(asked, 0, -1) if asked % ep == 0 and (ep == 1 or width % (sharding // ep) == 0))


def nodes_and_ranks(layout: str) -> tuple[int, int]:
    """Return the number of nodes, and of ranks per node."""
    nodes, times, ranks = layout.partition("x")
    return (int(nodes), int(ranks)) if times else (1, int(nodes))


def rank_count(layout: str, config: RunConfig) -> int:
    """Return the number of ranks of a test on `layout`."""
    if layout == SAME:
        return config.cluster.world_size
    nodes, ranks = nodes_and_ranks(layout)
    return nodes * ranks
