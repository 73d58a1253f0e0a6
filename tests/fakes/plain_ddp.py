"""Ordinary torchrun script: plain DDP with its own checkpoint file and resume, independent of orch.

    torchrun --nproc-per-node 2 plain_ddp.py --folder DIR [--steps N] [--every N] [--pause S]
        [--die-at STEP --die-rank RANK]

Learns next-byte prediction on its own source. Writes DIR/checkpoint.pt and, from rank 0, one line a step to
DIR/losses.jsonl and the final result to DIR/final.json. `--die-at` kills a rank once, the first time it gets there.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps while DIR/slow exists")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--die-rank", type=int, default=0)
    return parser.parse_args()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, 256)
    )


def batch(text: torch.Tensor, step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * world + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (32,), generator=generator)
    return torch.stack([text[s : s + CONTEXT] for s in starts]), text[starts + CONTEXT]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    os.replace(temporary, path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def die_once(folder: Path, step: int) -> None:
    """Kill this rank the first time only; the mark survives the restart."""
    mark = folder / "died"
    if not mark.exists():
        mark.write_text(str(step))
        os.kill(os.getpid(), signal.SIGKILL)


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = resume(args.folder / "checkpoint.pt", model.module, optimizer)
    value = torch.zeros(())
    for step in range(first + 1, args.steps + 1):
        inputs, targets = batch(text, step, rank, world)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach() / world
        dist.all_reduce(value)
        if rank == 0:
            with (args.folder / "losses.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": step, "loss": value.item(), "pid": os.getpid()}) + "\n")
        if rank == 0 and step % args.every == 0:
            save(args.folder / "checkpoint.pt", step, model.module, optimizer)
        time.sleep(args.pause if (args.folder / "slow").exists() else 0.0)
        if step == args.die_at and rank == args.die_rank:
            die_once(args.folder, step)
    if rank == 0:
        (args.folder / "final.json").write_text(json.dumps({"step": args.steps, "loss": value.item(), "from": first}))


def main() -> None:
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # On a busy machine threads of torch may abort the end of an interpreter ("terminate called without ...").
    os._exit(0)
