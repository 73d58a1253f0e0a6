"""PURE: the layouts on which a checkpoint is restored, and what they mean for a configuration."""

import math
from typing import Any

from orchestrator.config.restore_tests_config import SAME
from orchestrator.config.run_config import RunConfig
from trainer.contract.config_sections.parallel_config import Strategy


def with_layout(data: dict[str, Any], layout: str) -> dict[str, Any]:
    """The sections of a config that are others on `layout`: `same`, `RANKS` or `NODESxRANKS`.

    Tensor, context and expert parallelism and replicas stay as far as they fit, a pipeline does not; the rest of the
    ranks shard. A forward pass takes as many sequences as before, or as many fewer as divide a rank's share.
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
        if strategy == Strategy.DDP:  # one stands for all ranks
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
    """As it is where it divides the share of each of so many data-parallel ranks, else the largest below that does."""
    asked: int = train["micro_batch_size"]
    share, rest = divmod(train["batch_size"], ranks)
    if rest or not asked:
        return asked
    return max(size for size in range(1, min(asked, share) + 1) if share % size == 0)


def _ep(data: dict[str, Any], sharding: int) -> int:
    """The most of the ranks that shared experts which can share them among so many that share layers."""
    asked = math.gcd(data["parallel"].get("ep", 1), sharding)
    width = data.get("model", {}).get("experts", {}).get("ffn_dim", 1)
    return next(ep for ep in range(asked, 0, -1) if asked % ep == 0 and (ep == 1 or width % (sharding // ep) == 0))


def nodes_and_ranks(layout: str) -> tuple[int, int]:
    """Nodes, and ranks on each."""
    nodes, times, ranks = layout.partition("x")
    return (int(nodes), int(ranks)) if times else (1, int(nodes))


def rank_count(layout: str, config: RunConfig) -> int:
    """How many ranks a test on `layout` has."""
    if layout == SAME:
        return config.cluster.world_size
    nodes, ranks = nodes_and_ranks(layout)
    return nodes * ranks
