"""One rank that saves DTensors of every kind with our engine, or loads them with plain DCP: prints one JSON line.

Its arguments: ACTS RANK SIZE FOLDER, with ACTS like save:LAYOUT,load:LAYOUT
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpointing.proofs.world import World, plain_load
from tests.checkpointing.rank_process import begin, end, join

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((-1,), (Shard(0),)),
    "columns": ((-1,), (Shard(1),)),
    "replicated": ((-1,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "grid": ((2, 2), (Shard(0), Shard(1))),
}
"""Mesh and placements of the matrices; vectors follow as far as they can."""


def whole(seed: int = 1) -> dict[str, Tensor]:
    """Every tensor as one piece: matrices even and uneven, bfloat16, vectors, scalars, an empty one."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.even": torch.randn(16, 12, generator=draw),
        "model.uneven": torch.randn(7, 9, generator=draw),
        "model.half": torch.randn(12, 8, generator=draw).to(torch.bfloat16),
        "model.one_row": torch.randn(1, 6, generator=draw),
        "model.bias": torch.randn(19, generator=draw),
        "model.empty": torch.empty(0, 4),
        "optim.even.step": torch.tensor(3.0),
        "optim.even.count": torch.tensor(7),
    }


def placed(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    shape, placements = LAYOUTS[layout]
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", tuple(size if side == -1 else side for side in shape))
    return {
        key: distribute_tensor(tensor, mesh, list(placements))
        if tensor.dim() == 2 and tensor.numel()
        else tensor.clone()
        for key, tensor in tensors.items()
    }


def equal(tensors: dict[str, Tensor]) -> bool:
    full = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors.items()}
    return all(torch.equal(full[key], tensor) for key, tensor in whole().items())


def save(layout: str, folder: Path) -> dict[str, Any]:
    with World(folder).checkpointer() as made:
        made.prepare(placed(layout, whole()))
        made.save(1, placed(layout, whole()), {})
        made.wait()
        return {"committed": made.committed_step}


def load(layout: str, folder: Path) -> dict[str, Any]:
    target = placed(layout, {key: torch.zeros_like(tensor) for key, tensor in whole().items()})
    # Without collectives of objects: those of torch need NumPy, and planning a load needs none.
    plain_load(World(folder).folder(1), target)
    return {"exact": equal(target)}


def main() -> None:
    begin()
    acts, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    join(rank, size, folder.parent / f"meeting-{folder.name}-{acts}-{size}")
    steps = (one.split(":") for one in acts.split(","))
    end([{"save": save, "load": load}[act](layout, folder) for act, layout in steps])
