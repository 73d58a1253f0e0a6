"""Training programs that are slow for good reasons: `healthy.py KIND SECONDS`. None knows of orch."""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

kind, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
LONGEST = float(sys.argv[2]) / 3.5
"""Seconds of the longest pause; of ten minutes, nearly three."""
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(rank)


def make(width):
    return DDP(nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32)))


model, other = make(64), make(48)
optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=1e-3)]


def train(seconds, which=0):
    """Train until every rank agrees that the time is over."""
    net, optimizer = (model, other)[which], optimizers[which]
    until = time.monotonic() + seconds
    while True:
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=generator)
        F.mse_loss(net(x), x).backward()
        optimizer.step()
        time.sleep(0.05)
        over = torch.tensor(float(time.monotonic() > until))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over:
            return


def work(seconds):
    """Compute without gradients."""
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            model.module(torch.randn(64, 32, generator=generator))
            time.sleep(0.01)


class SlowDisk:
    """File on a file system that takes little at a time."""

    def __init__(self, stream, seconds):
        self.stream, self.pause = stream, seconds / 20

    def write(self, data):
        time.sleep(self.pause)
        return self.stream.write(data)

    def flush(self):
        self.stream.flush()


def evaluate():
    if rank == 0:
        work(LONGEST / 2)
    dist.barrier()


def compile_again(width):
    compiled = torch.compile(nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 32)))
    F.mse_loss(compiled(torch.randn(8, 32)), torch.zeros(8, 32)).backward()
    dist.barrier()


def save():
    if rank == 0:
        with tempfile.TemporaryFile() as file:
            state = {str(number): torch.randn(16) for number in range(12)}
            torch.save(state, SlowDisk(file, LONGEST))
    dist.barrier()


def prepare_data():
    if rank == 0:
        until = time.monotonic() + LONGEST
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < until:
                file.write(str(sorted(range(1000), key=str)).encode())
                time.sleep(0.05)
    dist.barrier()


turn = 0
if kind == "data":
    prepare_data()
while time.monotonic() < end:
    if kind == "optimizers":
        train(LONGEST / 4, which=turn % 2)
    elif kind == "rollouts":
        work(LONGEST / 2) if turn % 2 else time.sleep(LONGEST / 2)
        train(3)
    else:
        train(LONGEST / 4)
        if kind == "evaluation":
            evaluate()
        elif kind == "compile":
            compile_again(64 + 16 * turn)
        elif kind == "save" and turn == 0:
            save()
    turn += 1
    over = torch.tensor(float(time.monotonic() > end))
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    if over:
        break
print("healthy to the end", flush=True)
dist.destroy_process_group()
