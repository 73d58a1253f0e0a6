"""One rank of a program with its own loop, which uses `orch.checkpointer` and `orch.batches`.

`main` reads one JSON object: rank, world, store (of the process group), folder, steps, and `dies`, the step after which
rank 0's death leaves the others alone.
"""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import orch

SAMPLES, BATCH, EVERY = 50, 2, 4


class Samples(Dataset[Any]):
    """Samples with a random augmentation, which workers must repeat after a restart."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, x + 0.01 * torch.randn(8)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 8))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def digest(model: nn.Module) -> str:
    full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    values = torch.cat([one.detach().flatten() for one in full])
    return hashlib.sha256(bytes(values.view(torch.uint8).tolist())).hexdigest()


def train(case: dict[str, Any]) -> dict[str, Any]:
    model = build(case["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    place = (0, 1) if case["kind"] == "tp" else None
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=case.get("workers", 0))
    data = orch.batches(loader, data_parallel=place)
    extra = {"data": data, "schedule": schedule, "seen": (seen := {"count": 0})}
    rows = []
    with orch.checkpointer(
        model, optimizer, extra, folder=case["folder"], every=case.get("every", EVERY), data_parallel=place
    ) as checkpoints:
        first = step = checkpoints.restore()
        while step < case["steps"]:
            ids, x = next(data)
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step, seen["count"] = step + 1, seen["count"] + len(ids)
            rows.append(ids.tolist())
            orch.step(step, loss=loss)
            if orch.should_save():
                checkpoints.save(step)
            if step == case.get("dies"):
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
        committed = checkpoints.committed_step
    return {
        "committed": committed,
        "first": first,
        "digest": digest(model),
        "rows": rows,
        "seen": seen["count"],
        "stopped": orch.should_stop(),
    }


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{case['store']}", rank=case["rank"], world_size=case["world"],
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    found = train(case)
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


def ranks(folder: Path, world: int, number: int, **case: Any) -> list[list[str]]:
    """Return the arguments of all ranks."""
    shared = {"world": world, "store": str(folder / f"store-{number}"), "folder": str(folder / "checkpoints"), **case}
    return [[json.dumps({**shared, "rank": rank})] for rank in range(world)]
