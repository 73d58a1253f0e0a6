"""A loop in Megatron's style: --load and --save, iter_0000010 folders with a file per model-parallel rank, a tracker.

Ranks of one data-parallel group train the same model; two such groups stand for two model-parallel ranks.
"""

import argparse
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--save")
parser.add_argument("--load")
parser.add_argument("--train-iters", "--steps", type=int, default=60)
parser.add_argument("--save-interval", type=int, default=10)
parser.add_argument("--exit-signal-handler", action="store_true")
parser.add_argument("--pause", type=float, default=0.05)
args = parser.parse_args()
TRACKER = "latest_checkpointed_iteration.txt"
received = []


def place(folder, iteration, model_rank):
    return os.path.join(folder, f"iter_{iteration:07d}", f"mp_rank_{model_rank:02d}", "model_optim_rng.pt")


def save_checkpoint(iteration, model, optimizer, model_rank, data_rank):
    if data_rank == 0:
        path = place(args.save, iteration, model_rank)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        state = {"iteration": iteration, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.path.join(args.save, TRACKER), "w") as tracker:
            tracker.write(str(iteration))
    dist.barrier()


def load_checkpoint(model, optimizer, model_rank):
    tracker = os.path.join(args.load, TRACKER)
    if not os.path.isfile(tracker):
        return 0
    with open(tracker) as stream:
        iteration = int(stream.read())
    state = torch.load(place(args.load, iteration, model_rank))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["iteration"]


def signals_received():
    flag = torch.tensor([len(received)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag.item() > 0


def main():
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model_ranks = min(2, world)
    model_rank, data_rank = rank % model_ranks, rank // model_ranks
    groups = [dist.new_group(list(range(one, world, model_ranks))) for one in range(model_ranks)]
    torch.manual_seed(model_rank)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DDP(net, process_group=groups[model_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    iteration = load_checkpoint(model, optimizer, model_rank)
    if rank == 0:
        print("start after step", iteration, flush=True)
    while iteration < args.train_iters:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(iteration * world + rank))
        loss = F.mse_loss(model(x)[:, 0], x.sum(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        iteration += 1
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {iteration} loss {loss.item()}", flush=True)
        if args.exit_signal_handler and signals_received():
            save_checkpoint(iteration, model, optimizer, model_rank, data_rank)
            print("exiting program after receiving SIGTERM.", flush=True)
            return
        if iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, model_rank, data_rank)
    if rank == 0:
        text = str([value.tolist() for value in model.module.state_dict().values()])
        print("final loss", loss.item(), "weights", hashlib.sha256(text.encode()).hexdigest()[:16], flush=True)
    dist.destroy_process_group()


main()
