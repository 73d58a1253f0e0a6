"""Rows that need several real ranks: bytes read by a load compared with bytes needed."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from benchmarks.checkpoint.rows import Measured, Setting
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.event_sink import emit_nothing
from checkpointing.owner import Owner
from checkpointing.tiers.tier import RunTiers

ROWS_CUT, COLUMNS_CUT, WHOLE = Shard(0), Shard(1), Replicate()
TURNS: dict[str, tuple[tuple[int, Placement], tuple[int, Placement]]] = {
    "rows": ((2, ROWS_CUT), (4, ROWS_CUT)),
    "rows-back": ((4, ROWS_CUT), (2, ROWS_CUT)),
    "columns": ((2, ROWS_CUT), (4, COLUMNS_CUT)),
    "columns-back": ((4, COLUMNS_CUT), (2, ROWS_CUT)),
    "replicated": ((4, WHOLE), (4, WHOLE)),
}
"""Ranks and placement of the save, then of the load."""

_TENSORS, _SIDE = 64, 1024
_PATIENCE_S = 240


def reshard(setting: Setting, turn: str) -> Measured:
    """Measure the bytes read by all ranks, compared with the bytes of their tensors."""
    told = _run_turn(setting, turn)
    needed = sum(rank["needed"] for rank in told)
    return _count_bytes(setting, told, needed)


def replicated(setting: Setting) -> Measured:
    """Measure the bytes read by four ranks that all need everything, compared with the bytes of one of them."""
    told = _run_turn(setting, "replicated")
    return _count_bytes(setting, told, told[0]["needed"])


def _count_bytes(setting: Setting, told: list[dict[str, Any]], needed: int) -> Measured:
    system = sum(rank["system"] for rank in told) / needed
    return Measured(
        ours=told[0]["ours"], limit=needed, unit="MiB", rounds=1,
        peers={"dcp.load": sum(rank["dcp"] for rank in told)},
        demands=(("bit-exact", all(rank["exact"] for rank in told)),),
        note=f"read calls of all ranks as the kernel counts them, sockets too: {system:.2f}",
    )  # fmt: skip


def _run_turn(setting: Setting, turn: str) -> list[dict[str, Any]]:
    (savers, _), (loaders, _) = TURNS[turn]
    _run(setting, turn, "save", savers)
    return _run(setting, turn, "load", loaders)


def _run(setting: Setting, turn: str, act: str, size: int) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "benchmarks.checkpoint.row_process", "--rank", turn, act, str(setting.scale)]
    ranks = [
        subprocess.Popen(
            [*words, str(setting.folder), str(rank), str(size)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [rank.communicate(timeout=_PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        if rank.returncode:
            raise RuntimeError(f"{turn}, {act}: {errors.strip()[-2000:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def rank_main(turn: str, act: str, scale: float, folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Run one rank of a save or of a load."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{turn}-{act}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    (_, saved_as), (_, loaded_as) = TURNS[turn]
    number = max(4, int(_TENSORS * scale))
    owner = Owner(1, "ab12cd34", (), lambda: True)
    checkpointer = Checkpointer(owner, World(), RunTiers.single(folder / "ranks", keep=2), emit_nothing)
    if act == "save":
        checkpointer.save(1, _state(number, saved_as, 1), {})
        checkpointer.wait()
        checkpointer.close()
        return {"committed": checkpointer.committed_step}
    told = _measure_load(checkpointer, folder, number, loaded_as)
    checkpointer.close()
    return told


def _measure_load(checkpointer: Checkpointer, folder: Path, number: int, placement: Placement) -> dict[str, Any]:
    target, wanted = _state(number, placement, 0), _state(number, placement, 1)
    before = _read_calls()
    restored = checkpointer.restore(target)
    after = _read_calls()
    assert restored is not None
    exact = all(torch.equal(_local(target[key]), _local(wanted[key])) for key in wanted)
    (place,) = (folder / "ranks").glob("step-*")
    # Each rank alone, as dcp.load reads in any case: only its planning would be shared.
    dcp.load(target, checkpoint_id=place, no_dist=True)
    needed = sum(_local(tensor).nbytes for tensor in target.values())
    return {
        "needed": needed, "ours": restored.bytes_read, "exact": exact,  # of all ranks together
        "system": after - before, "dcp": _read_calls() - after,
    }  # fmt: skip


def _state(number: int, placement: Placement, factor: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(_SIDE * _SIDE, dtype=torch.float32).reshape(_SIDE, _SIDE)
    return {
        f"model.{index:03d}.weight": distribute_tensor(factor * (values + index), mesh, [placement])
        for index in range(number)
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read_calls() -> int:
    """Return the bytes that this process has asked the kernel to read, from any source."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
