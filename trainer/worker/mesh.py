"""The device mesh: dp_replicate x dp_shard x tp, tensor parallelism innermost so that it stays within a node."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.contract.parallel_config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of this generation share the model, seen from one of them."""

    mesh: DeviceMesh
    device: torch.device
    rank: int
    world_size: int

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one dimension, or two (replicate, shard) for HSDP."""
        if self.mesh["dp_replicate"].size() > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"]

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.world_size // self.tp.size()

    @property
    def dp_rank(self) -> int:
        """Which share of every batch this rank reads; the same for all ranks of one tensor-parallel group."""
        return self.rank // self.tp.size()


def build(parallel: ParallelConfig, device: torch.device, rank: int, world_size: int) -> Layout:
    """Build the mesh over the initialized world; raises ValueError when the sizes do not multiply to it."""
    sizes = parallel.mesh_sizes(world_size)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=sizes._fields)
    return Layout(mesh=mesh, device=device, rank=rank, world_size=world_size)
