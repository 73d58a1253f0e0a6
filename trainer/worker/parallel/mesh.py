"""The device mesh: pp x dp_replicate x dp_shard x cp x tp, tensor parallelism innermost so that it stays within a node.

Parameters lie on a mesh of their own, on which the ranks that share a sequence (cp) count among the shards, or with
`ddp` among the replicas: they differ in nothing but the tokens that they compute on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.contract.parallel_config import ExpertSizes, MeshSizes, ParallelConfig, ParameterSizes, place_in


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of this generation share the model, seen from one of them."""

    mesh: DeviceMesh
    """That of parameters: dp_replicate, dp_shard, tp; before them pp, where the model has several stages."""

    sequence_mesh: DeviceMesh | None
    """Where ranks share sequences: dp, cp, tp; else None."""

    sizes: MeshSizes
    device: torch.device
    rank: int
    world_size: int

    expert_mesh: DeviceMesh | None = None
    """Where ranks share experts: dp_replicate, dp_shard, ep, and pp as in `mesh`; else None."""

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one dimension, or two (replicate, shard) for HSDP."""
        if self.mesh["dp_replicate"].size() > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"]

    @property
    def fsdp_of_experts(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts that ranks share."""
        assert self.expert_mesh is not None
        if self.expert_mesh["dp_replicate"].size() > 1:
            return self.expert_mesh["dp_replicate", "dp_shard"]
        return self.expert_mesh["dp_shard"]

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that share this rank's experts; only where there are several."""
        assert self.expert_mesh is not None
        return self.expert_mesh["ep"]

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def cp(self) -> DeviceMesh:
        """The ranks that share this rank's sequences; only where there are several."""
        assert self.sequence_mesh is not None
        return self.sequence_mesh["cp"]

    @property
    def pp(self) -> DeviceMesh:
        """The ranks that have the other stages of the model for this rank's tokens; only where there are several."""
        return self.mesh["pp"]

    @property
    def place(self) -> MeshSizes:
        """Where this rank stands in each dimension."""
        return MeshSizes(*place_in(self.sizes, self.rank))

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.sizes.dp_replicate * self.sizes.dp_shard

    @property
    def ranks_per_share(self) -> int:
        """Ranks that read the same data."""
        return self.world_size // self.dp_size

    @property
    def dp_rank(self) -> int:
        """Which share of every batch this rank reads; the same for all ranks that share its layers or its sequences."""
        return self.place.dp_replicate * self.sizes.dp_shard + self.place.dp_shard

    @property
    def token_rank(self) -> int:
        """Which tokens of a batch this rank computes on; the same for all ranks of one tensor-parallel group."""
        return self.dp_rank * self.sizes.cp + self.place.cp

    @property
    def generator_rank(self) -> int:
        """Which random numbers this rank draws: those of one tensor-parallel group draw the same ones."""
        return self.place.pp * self.dp_size * self.sizes.cp + self.token_rank


def build(parallel: ParallelConfig, device: torch.device, rank: int, world_size: int) -> Layout:
    """Build the meshes over the initialized world; raises ValueError when the sizes do not multiply to it."""
    sizes, of_parameters = parallel.mesh_sizes(world_size), parallel.parameter_sizes(world_size)
    return Layout(
        mesh=_mesh(of_parameters, device),
        sequence_mesh=_sequence_mesh(sizes, device) if sizes.cp > 1 else None,
        sizes=sizes, device=device, rank=rank, world_size=world_size,
        expert_mesh=_expert_mesh(parallel.expert_sizes(world_size), device) if parallel.ep > 1 else None,
    )  # fmt: skip


def _mesh(sizes: ParameterSizes | ExpertSizes, device: torch.device, **options: Any) -> DeviceMesh:
    """With a dimension for stages only where there are several."""
    dimensions = {name: size for name, size in sizes._asdict().items() if name != "pp" or size > 1}
    return init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions), **options)


def _sequence_mesh(sizes: MeshSizes, device: torch.device) -> DeviceMesh:
    """With groups of its own for `cp`, also where they have the members of others: so traffic is told apart."""
    return init_device_mesh(
        device.type,
        (sizes.pp * sizes.dp_replicate * sizes.dp_shard, sizes.cp, sizes.tp),
        mesh_dim_names=("dp", "cp", "tp"),
        backend_override={"cp": _backend(device)},
    )


def _expert_mesh(sizes: ExpertSizes, device: torch.device) -> DeviceMesh:
    """With groups of its own for `ep`, for the same reason; its ranks, those of `tp` too, are neighbours in a stage."""
    return _mesh(sizes, device, backend_override={"ep": _backend(device)})


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"
