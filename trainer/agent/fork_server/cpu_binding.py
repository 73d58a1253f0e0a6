"""PURE: which cores and GPUs belong to which rank."""

from collections.abc import Collection, Mapping

from trainer.contract.config import JobConfig
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.node_identity import NodeIdentity


def cores_of_rank(
    identity: NodeIdentity, config: JobConfig, node_rank: int, local_rank: int, allowed: Collection[int]
) -> list[int]:
    """An equal share of the allowed cores, contiguous; empty (not bound) when there are fewer cores than ranks.

    Simulated nodes share one machine, so there the cores are divided among all ranks of the job.
    """
    per_node = config.cluster.ranks_per_node
    simulated = traits(identity.kind).simulated_nodes
    ranks = config.cluster.world_size if simulated else per_node
    mine = node_rank * per_node + local_rank if simulated else local_rank
    cores = sorted(allowed)
    if len(cores) < ranks:
        return []
    return cores[mine * len(cores) // ranks : (mine + 1) * len(cores) // ranks]


def gpus(identity: NodeIdentity, config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for a simulated node, when there are enough GPUs for each to have its own."""
    per_node = config.cluster.gpus_per_node
    if not traits(identity.kind).simulated_nodes or not per_node:
        return {}
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(visible) < per_node * config.cluster.all_nodes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[identity.node * per_node : (identity.node + 1) * per_node])}
