"""A loop with Accelerate, in the style of its example `checkpointing.py`: save_state to step_N, load the newest one."""

import argparse
import hashlib
import os
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
args = parser.parse_args()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    x = torch.randn(1280, 64)
    data = DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = 0
    if os.path.isdir(args.folder):
        saved = [int(name.removeprefix("step_")) for name in os.listdir(args.folder) if name.startswith("step_")]
        if saved:
            step = max(saved)
            accelerator.load_state(os.path.join(args.folder, f"step_{step}"))
    accelerator.print("start after step", step, flush=True)
    for epoch in range(step // len(data), 1 << 30):
        if step == args.steps:
            break
        data.set_epoch(epoch)
        skipped = step % len(data)
        for x, y in accelerator.skip_first_batches(data, skipped) if skipped else data:
            loss = F.mse_loss(model(x)[:, 0], y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(args.pause)
            accelerator.print(f"step {step} loss {loss.item()}", flush=True)
            if step % 10 == 0:
                accelerator.save_state(os.path.join(args.folder, f"step_{step}"))
            if step == args.steps:
                break
    weights = str([value.tolist() for value in accelerator.unwrap_model(model).state_dict().values()])
    digest = hashlib.sha256(weights.encode()).hexdigest()[:16]
    accelerator.print("final loss", loss.item(), "weights", digest, flush=True)


main()
