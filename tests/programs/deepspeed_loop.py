"""A DeepSpeed loop as in its tutorials: ZeRO 1, save_checkpoint every ten steps, load_checkpoint of the newest."""

import argparse
import hashlib
import os
import time

import deepspeed
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
args = parser.parse_args()
SETTINGS = {
    "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip


def main():
    deepspeed.init_distributed("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    _, state = engine.load_checkpoint(args.folder)
    start = state["step"] if state else 0
    if rank == 0:
        print("start after step", start, flush=True)
    for step in range(start + 1, args.steps + 1):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * world + rank))
        loss = F.mse_loss(engine(x)[:, 0], x.sum(dim=1))
        engine.backward(loss)
        engine.step()
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {step} loss {loss.item()}", flush=True)
        if step % 10 == 0:
            engine.save_checkpoint(args.folder, client_state={"step": step})
    if rank == 0:
        weights = str([value.tolist() for value in engine.module.state_dict().values()])
        print("final loss", loss.item(), "weights", hashlib.sha256(weights.encode()).hexdigest()[:16], flush=True)


main()
