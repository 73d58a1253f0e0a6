"""Rows of the checkpoint table that need several real ranks: bytes read by a load compared with bytes needed."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from benchmarks.checkpoint_sides import replace_numpy_conversions
from benchmarks.runner import OURS, Result, answer, run_in_process, serve
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.event_sink import emit_nothing
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers

LAYOUTS: dict[str, tuple[tuple[int, Placement], tuple[int, Placement]]] = {
    "rows": ((2, Shard(0)), (4, Shard(0))),
    "rows-back": ((4, Shard(0)), (2, Shard(0))),
    "columns": ((2, Shard(0)), (4, Shard(1))),
    "columns-back": ((4, Shard(1)), (2, Shard(0))),
    "replicated": ((4, Replicate()), (4, Replicate())),
}
"""Number of ranks and placement, when saving and when loading."""
_TENSORS, _SIDE = 64, 1024


def bytes_read(folder: Path, rounds: int, scale: float, layout: str) -> Result:
    """Compare the bytes read by all ranks with the bytes of their tensors, or of one rank's tensors if replicated."""
    for act, (size, _placement) in zip(("save", "load"), LAYOUTS[layout], strict=True):
        ranks = [
            run_in_process("checkpoint_reshard", "rank_main", folder, scale, layout, act, rank, size)
            for rank in range(size)
        ]
        try:
            found = [answer(rank, 240) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    needed = found[0]["needed"] if layout == "replicated" else sum(rank["needed"] for rank in found)
    dcp, system = (sum(rank[key] for rank in found) / needed for key in ("dcp", "system"))
    return Result(
        values=[found[0]["ours"] / needed], others={"dcp.load": [dcp]}, measured_unit="MiB",
        measured={OURS: found[0]["ours"], "needed": needed},
        demands=[] if all(rank["exact"] for rank in found) else ["bit-exact"],
        notes=[f"read calls of all ranks as counted by the kernel, including sockets: {system:.2f}"],
    )  # fmt: skip


def rank_main(folder: Path, scale: float, layout: str, act: str, rank: int, size: int) -> dict[str, Any]:
    """Run one rank of a save or a load."""
    meeting = f"file://{folder}/meeting-{layout}-{act}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    (_, saved_as), (_, loaded_as) = LAYOUTS[layout]
    number = max(4, int(_TENSORS * scale))
    owner = Owner(1, "ab12cd34", (), lambda: True)
    checkpointer = Checkpointer(owner, World(), RunTiers.single(folder / "ranks", keep=2), emit_nothing)
    found = {}
    if act == "save":
        checkpointer.save(1, _placed_state(number, saved_as, 1), {})
        checkpointer.wait()
    else:
        found = _measure_load(checkpointer, folder, number, loaded_as)
    checkpointer.close()
    return found


def _measure_load(checkpointer: Checkpointer, folder: Path, number: int, placement: Placement) -> dict[str, Any]:
    target, wanted = _placed_state(number, placement, 0), _placed_state(number, placement, 1)
    before = _bytes_requested()
    restored = checkpointer.restore(target)
    after = _bytes_requested()
    assert restored is not None
    exact = all(torch.equal(_local(target[key]), _local(wanted[key])) for key in wanted)
    (place,) = (folder / "ranks").glob("step-*")
    # Each rank loads on its own, because dcp.load would share only the planning, not the reads.
    dcp_loader.load(target, checkpoint_id=place, no_dist=True)
    needed = sum(_local(tensor).nbytes for tensor in target.values())
    return {
        "needed": needed, "ours": restored.bytes_read, "exact": exact,  # of all ranks together
        "system": after - before, "dcp": _bytes_requested() - after,
    }  # fmt: skip


def _placed_state(number: int, placement: Placement, factor: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(_SIDE * _SIDE, dtype=torch.float32).reshape(_SIDE, _SIDE)
    return {
        f"model.{index:03d}.weight": distribute_tensor(factor * (values + index), mesh, [placement])
        for index in range(number)
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_requested() -> int:
    """Return the bytes that this process has asked the kernel to read, from any source."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    replace_numpy_conversions()
    torch.set_num_threads(1)
    serve(globals())
