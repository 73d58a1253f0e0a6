"""Plain DDP, as in most scripts: it loads the newest ckpt_STEP.pt in its folder, and saves one every ten steps."""

import argparse
import hashlib
import os
import re
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
args = parser.parse_args()


def newest(folder):
    found = [re.fullmatch(r"ckpt_(\d+)\.pt", name) for name in os.listdir(folder)]
    return max((int(match[1]) for match in found if match), default=0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.folder, exist_ok=True)
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = newest(args.folder)
    if start:
        state = torch.load(f"{args.folder}/ckpt_{start}.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if rank == 0:
        print("start after step", start, flush=True)
    for step in range(start + 1, args.steps + 1):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * world + rank))
        loss = F.mse_loss(model(x)[:, 0], x.sum(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {step} loss {loss.item()}", flush=True)
        if step % 10 == 0 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.folder}/ckpt_{step}.pt")
    if rank == 0:
        weights = str([value.tolist() for value in model.module.state_dict().values()])
        print("final loss", loss.item(), "weights", hashlib.sha256(weights.encode()).hexdigest()[:16], flush=True)
    dist.destroy_process_group()


main()
