"""A plain torchrun script for GPUs or CPUs: DDP, with its own checkpoints and resume. It does not use orch."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER, STEPS, EVERY, KEPT = Path(sys.argv[1]), int(sys.argv[2]), 10, 3


def batch(step, rank, world):
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(32, 16, generator=generator)
    return x, x.cumsum(dim=1)


def main():
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    FOLDER.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first, saved = 1, sorted(FOLDER.glob("checkpoint-*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    if saved:
        state = torch.load(saved[-1], map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1

    for step in range(first, STEPS + 1):
        x, y = (tensor.to(device) for tensor in batch(step, rank, world))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % EVERY == 0:
            saved.append(FOLDER / f"checkpoint-{step}.pt")
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / "new")
            (FOLDER / "new").replace(saved[-1])
            if len(saved) > KEPT:
                saved.pop(0).unlink(missing_ok=True)
            print(f"step {step} loss {loss.item()}", flush=True)
    if rank == 0:
        weight = sum(parameter.double().sum() for parameter in model.parameters())
        (FOLDER / "final.json").write_text(json.dumps({"loss": loss.item(), "sum": weight.item(), "from": first}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
