"""One rank that saves layouts, or restores them from all: arguments RANK SIZE FOLDER JOBS, [[mode, layout]...]."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpointing.config import CheckpointConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import RankGroup, World
from checkpointing.engine.restore.source import local_box, local_part
from checkpointing.engine.state.fingerprints import combine, fingerprint, partial
from checkpointing.errors import NothingIntact
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.rank_process import begin, end, join

NONCE = "ab12cd34"
BY_NODE = " by node"
"""What the name of a layout ends in that is saved with one file for each node, of two ranks."""
LAYOUTS = {"1": 1, "dp2": 2, "dp4": 4, "tp2": 2, "dp2xtp2": 4, "hsdp": 4, "dp4 by node": 4, "dp2xtp2 by node": 4}


class Net(nn.Module):
    """Even and uneven shapes, one weight larger than a chunk, a norm that every tensor-parallel rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(7, 5)
        self.norm, self.large = nn.LayerNorm(7), nn.Linear(1024, 2304, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return values  # never trained


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def loose(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "loose/uneven": torch.randn(9, 5, generator=draw),
        "loose/half": torch.randn(3, 10, 4, generator=draw).to(torch.bfloat16),
        "loose/tiny": torch.randn(1, 3, generator=draw),
        "loose/flags": torch.randint(0, 2, (13,), generator=draw).to(torch.bool),
        "loose/none": torch.empty(0, 4),
        "step": torch.tensor(float(seed)),
    }


LOOSE = {"loose/uneven": 0, "loose/half": 1, "loose/tiny": 0, "loose/flags": 0}


def whole(seed: int) -> dict[str, Tensor]:
    return {**{key: value.detach() for key, value in model(seed).named_parameters()}, **loose(seed)}


@cache
def placed(layout: str, seed: int) -> dict[str, Tensor]:
    """The state of `seed` in a layout, as a trainer would have it; the same tensors each time."""
    net, rest = model(seed), loose(seed)
    size, layout = LAYOUTS[layout], layout.removesuffix(BY_NODE)
    if size > 1:
        if layout in ("dp2xtp2", "hsdp"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        else:
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("inner",))
        tp = mesh["inner"] if "tp" in layout else None
        if tp is not None:
            parallelize_module(
                net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel(), "large": RowwiseParallel()}
            )
        if layout != "tp2":
            fully_shard(net, mesh=mesh["outer"] if layout == "dp2xtp2" else mesh)
        rest = {key: _spread(key, tensor, layout, mesh) for key, tensor in rest.items()}
    return {**dict(net.named_parameters()), **rest}


def _spread(key: str, tensor: Tensor, layout: str, mesh: DeviceMesh) -> Tensor:
    if key not in LOOSE:
        return tensor
    dimension = LOOSE[key]
    if layout == "hsdp":
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(dimension)])
    if layout == "dp2xtp2":
        return distribute_tensor(tensor, mesh, [Shard(dimension), Shard((dimension + 1) % tensor.dim())])
    return distribute_tensor(tensor, mesh, [Shard((dimension + (layout == "tp2")) % tensor.dim())])


def checkpointer(folder: Path, reported: list[Any], layout: str) -> Checkpointer:
    owner = Owner(1, NONCE, (), lambda: True)
    on_event = lambda kind, data: reported.append((kind, data))  # noqa: E731
    world, config = World(), CheckpointConfig()
    if layout.endswith(BY_NODE):
        world, config = World(leads_node=dist.get_rank() % 2 == 0), CheckpointConfig(files="node")
    return Checkpointer(owner, world, RunTiers.single(folder), on_event, link=InProcessWriter(), config=config)


def save(layout: str, folder: Path) -> dict[str, Any]:
    made = checkpointer(folder / f"saved-{layout}", reported := [], layout)
    made.save(7, placed(layout, 7), {"layout": layout})
    made.close()
    return {"committed": made.committed_step, "reported": reported}


def load(layout: str, folder: Path) -> dict[str, Any]:
    """Restore this layout from all of them; what was found, read and needed."""
    expected, tensors, found, parts = placed(layout, 7), placed(layout, 0), {}, {}
    for source in LAYOUTS:
        _zero(tensors)
        made = checkpointer(folder / f"saved-{source}", [], layout)
        restored = made.restore(tensors)
        made.close()
        assert restored is not None
        found[source] = {
            "step": restored.step,
            "layout": restored.extra["layout"],
            "differing": _differing(tensors, expected),
            "read": restored.bytes_read,
            "needed": restored.bytes_needed,
        }
        boxes = {key: local_box(tensor).offsets for key, tensor in tensors.items()}
        parts[source] = {
            key: (boxes[key], partial(local_part(tensor), boxes[key], tensor.shape)) for key, tensor in tensors.items()
        }
    words = {key: fingerprint(tensor) for key, tensor in whole(7).items()}
    gathered = _gathered(parts)
    for source, seen in found.items():
        put_together = _words([reported[source] for reported in gathered])
        seen["fingerprints"] = [key for key, word in put_together.items() if word != words[key]]
    return {"found": found}


def memory(layout: str, folder: Path) -> dict[str, Any]:
    """Restore this layout from its own files and from memory, with the plan prepared before."""
    expected, tensors, found = placed(layout, 7), placed(layout, 0), []
    made = checkpointer(_copied(layout, folder, "memory"), reported := [], layout)
    made.prepare(tensors)
    for step in (7, 8):
        _zero(tensors)
        restored = made.restore(tensors)
        assert restored is not None
        found.append((restored.step, restored.tier == "memory", _differing(tensors, expected)))
        made.save(step + 1, tensors, {"layout": layout})
        made.wait()
    made.close()
    return {"found": found, "refused": [data for kind, data in reported if kind == "checkpoint.refused"]}


def _zero(tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()


def _copied(layout: str, folder: Path, mode: str) -> Path:
    """What was saved in a layout, in a folder of its own."""
    copy = folder / f"{mode}-{layout}"
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(folder / f"saved-{layout}", copy)
    if dist.is_initialized():
        dist.barrier()
    return copy


def _differing(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Keys whose part on this rank is not the expected one."""
    return [key for key in expected if not torch.equal(local_part(tensors[key]), local_part(expected[key]))]


def _words(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Fingerprints put together from the ranks' parts; ranks that hold the same part of a tensor count as one."""
    parts: dict[str, dict[Any, Any]] = {key: {} for reported in ranks for key in reported}
    for reported in ranks:
        for key, (offsets, part) in reported.items():
            if part != (0, 0):
                parts[key][offsets] = part
    return {key: combine(found.values()) for key, found in parts.items()}


def _gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = RankGroup(None)
    found = ranks.all_gather(mine)
    ranks.close()
    return found


def damaged(layout: str, folder: Path) -> dict[str, Any]:
    """Restore a layout from damaged files of four ranks on two nodes; returns the reason of the refusal."""
    made = checkpointer(folder / "damaged", [], layout)
    try:
        made.restore(placed(layout, 0))
    except NothingIntact as error:
        return {"refused": str(error)}
    finally:
        made.close()
    return {"refused": None}


def few(layout: str, folder: Path) -> dict[str, Any]:
    """Save and restore one tensor, of which only one rank writes something."""
    made = checkpointer(folder / f"few-{layout}", [], layout)
    made.save(7, {"step": torch.tensor(7.0)}, {})
    made.wait()
    tensors = {"step": torch.tensor(0.0)}
    restored = made.restore(tensors)
    made.close()
    return {"failure": made.failure, "step": restored.step if restored else None, "value": tensors["step"].item()}


MODES: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "save": save, "load": load, "memory": memory, "damaged": damaged, "few": few
}  # fmt: skip


def main() -> None:
    begin()
    rank, size, folder, jobs = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    if size > 1:
        join(rank, size, folder / f"meeting-{'-'.join(jobs[0])}")
    end([MODES[mode](layout, folder) for mode, layout in jobs])
