"""Script that torchrun and orch both run: ordinary DDP with its own checkpoint, independent of the launcher.

    RANK=... torchrun ... ddp_script.py FOLDER STEPS STEP_SECONDS

Every rank writes one line per step to FOLDER/rank-N.jsonl: {time, step, pid}. Ranks sleep for most of each step, so
that the machine is as idle as one whose ranks compute on GPUs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_SAVE_EVERY = 5


def main(folder: Path, steps: int, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
    with (folder / f"rank-{dist.get_rank()}.jsonl").open("a") as lines:
        for step in range(first + 1, steps + 1):
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(seconds)
            write_step(lines, step)
            if dist.get_rank() == 0 and step % _SAVE_EVERY == 0:
                torch.save(
                    {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    saved.with_suffix(".tmp"),
                )
                saved.with_suffix(".tmp").rename(saved)
    dist.destroy_process_group()


def write_step(lines: TextIO, step: int) -> None:
    lines.write(json.dumps({"time": time.time(), "step": step, "pid": os.getpid()}) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
