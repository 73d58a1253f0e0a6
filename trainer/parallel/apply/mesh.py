"""The device mesh: pp x dp_replicate x dp_shard x cp x tp, with tp innermost so that it stays within a node.

Parameters have their own mesh. In this mesh, ranks that share a sequence (cp) count as shards, or as replicas with
`ddp`, because they differ only in their tokens.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.parallel.dimension import Splits, locate_rank
from trainer.parallel.expert import expert_sizes
from trainer.parallel.parallel_config import DIMENSIONS, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of this generation's ranks, as seen by one rank."""

    mesh: DeviceMesh
    """Mesh of parameters: dp_replicate, dp_shard, tp; preceded by pp if the model has several stages."""

    sequence_mesh: DeviceMesh | None
    """Mesh dp, cp, tp if ranks share sequences; else None."""

    sizes: Mapping[str, int]
    """Size of each dimension, outermost first."""
    device: torch.device
    rank: int
    world_size: int

    expert_mesh: DeviceMesh | None = None
    """Mesh dp_replicate, dp_shard, ep (with pp as in `mesh`) if ranks share experts; else None."""

    @property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh for `fully_shard`: one dimension, or two (replicate, shard) for HSDP."""
        return _shard_mesh(self.mesh)

    @property
    def fsdp_of_experts(self) -> DeviceMesh:
        """Return the mesh for `fully_shard` of shared experts."""
        assert self.expert_mesh is not None
        return _shard_mesh(self.expert_mesh)

    @property
    def ep(self) -> DeviceMesh:
        """Return the ranks that share this rank's experts; there must be several."""
        assert self.expert_mesh is not None
        return self.expert_mesh["ep"]

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def sequence_ranks(self) -> DeviceMesh:
        """Return the ranks that share this rank's sequences; there must be several."""
        assert self.sequence_mesh is not None
        _, name, _ = self.sequence_mesh.mesh_dim_names or ()
        return self.sequence_mesh[name]

    @property
    def pp(self) -> DeviceMesh:
        """Return the ranks with the other stages of the model for this rank's tokens; there must be several."""
        return self.mesh["pp"]

    @property
    def place(self) -> dict[str, int]:
        """Return this rank's index in each dimension."""
        return locate_rank(self.sizes, self.rank)

    def _index(self, *, without: Collection[Splits]) -> int:
        """Return this rank's index in a mesh without the dimensions that split anything in `without`."""
        left_out = {dimension.name for dimension in DIMENSIONS if dimension.splits in without}
        index, place = 0, self.place
        for name, size in self.sizes.items():
            index = index if name in left_out else index * size + place[name]
        return index

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that read different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def ranks_per_share(self) -> int:
        """Return the number of ranks that read the same data."""
        return self.world_size // self.dp_size

    @property
    def dp_rank(self) -> int:
        """Return the index of this rank's batch share; equal on ranks that share its layers or sequences."""
        return self._index(without=(Splits.LAYERS, Splits.SEQUENCE, Splits.MATRICES))

    @property
    def token_rank(self) -> int:
        """Return an index of the batch tokens that this rank computes; equal within a tensor-parallel group."""
        return self._index(without=(Splits.LAYERS, Splits.MATRICES))

    @property
    def generator_rank(self) -> int:
        """Return the index of this rank's random stream; equal within a tensor-parallel group."""
        return self._index(without=(Splits.MATRICES,))


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def build(parallel: ParallelConfig, device: torch.device, rank: int, world_size: int) -> Layout:
    """Build the meshes over the initialized world. Raises ValueError unless the sizes multiply to the world size."""
    sizes = parallel.mesh_sizes(world_size)
    meshes = _Meshes(device, rank, world_size)
    sequence_mesh = None
    for dimension in DIMENSIONS:
        size, tp = dimension.size(parallel), sizes["tp"]
        if dimension.splits is not Splits.SEQUENCE or size == 1:
            continue
        by_sequence = {"dp": world_size // (size * tp), dimension.name: size, "tp": tp}
        sequence_mesh = meshes.build_mesh(by_sequence, own_group=dimension.name)
    return Layout(
        mesh=meshes.build_mesh(_without_one_stage(parallel.parameter_sizes(world_size))),
        sequence_mesh=sequence_mesh,
        sizes=sizes, device=device, rank=rank, world_size=world_size,
        expert_mesh=(
            meshes.build_mesh(_without_one_stage(expert_sizes(parallel, world_size)), own_group="ep")
            if parallel.ep > 1 else None
        ),
    )  # fmt: skip


def _without_one_stage(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name != "pp" or size > 1}


class _Meshes:
    """Builder of meshes whose one-rank dimensions share a single group; torch creates one per dimension and rank.

    With gloo, each group has a thread that wakes up a hundred times per second. Five more of these threads cost a rank
    with one core 2 % of its time.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._device, self._rank, self._world_size = device, rank, world_size
        self._alone: dist.ProcessGroup | None = None

    def build_mesh(self, dimensions: Mapping[str, int], own_group: str = "") -> DeviceMesh:
        """Return a mesh of all ranks, innermost dimension last. Raises ValueError if the sizes do not fit the world.

        `own_group`: this dimension gets its own group, to separate traffic, even if another group has the same members.
        """
        if math.prod(dimensions.values()) != self._world_size:
            raise ValueError(f"a mesh of {dict(dimensions)} does not have {self._world_size} ranks")
        several = {name: size for name, size in dimensions.items() if size > 1} or dimensions
        made = init_device_mesh(
            self._device.type, tuple(several.values()), mesh_dim_names=tuple(several),
            backend_override={own_group: _backend(self._device)} if own_group else None,
        )  # fmt: skip
        if len(several) == len(dimensions):
            return made
        groups = [made.get_group(name) if name in several else self._group_of_one() for name in dimensions]
        ranks = torch.arange(self._world_size, device="cpu").view(*dimensions.values())
        return DeviceMesh.from_group(groups, self._device.type, ranks, mesh_dim_names=tuple(dimensions))

    def _group_of_one(self) -> dist.ProcessGroup:
        if self._alone is None:
            self._alone = dist.new_group([self._rank], use_local_synchronization=True, group_desc="mesh_one_rank")
        assert self._alone is not None
        return self._alone


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"


def all_gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of the group, in rank order; sent as JSON, because pickled data could run code."""
    text = json.dumps(value).encode()
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size() if group is None else group.size())]
    dist.all_gather(sizes, size, group=group)
    row = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=device)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.zeros_like(row) for _ in sizes]
    dist.all_gather(rows, row, group=group)
    return [json.loads(bytes(one[: int(length)].tolist())) for one, length in zip(rows, sizes, strict=True)]
