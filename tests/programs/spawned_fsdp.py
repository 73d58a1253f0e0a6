"""The style of courses: `mp.spawn` and a TCP store on localhost, FSDP with full shards, epochs with set_epoch."""

import argparse
import functools
import hashlib
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--world", type=int, default=2)
parser.add_argument("--port", type=int, default=12355)
args = parser.parse_args()
BATCH, SAMPLES = 8, 160


def full_state(model):
    settings = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
        return model.state_dict(), None


def save(model, optimizer, epoch, rank):
    weights, _ = full_state(model)
    moments = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        path = f"{args.folder}/epoch_{epoch}.pt"
        torch.save({"model": weights, "optimizer": moments, "epoch": epoch}, path)
    dist.barrier()


def load(model, optimizer):
    saved = [int(name[6:-3]) for name in os.listdir(args.folder) if name.startswith("epoch_") and name.endswith(".pt")]
    if not saved:
        return 0
    state = torch.load(f"{args.folder}/epoch_{max(saved)}.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    return state["epoch"]


def train(rank, world):
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{args.port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, 64)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(
        net, sharding_strategy=ShardingStrategy.FULL_SHARD, auto_wrap_policy=policy, use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(model, optimizer)
    dataset = TensorDataset(data, data.sum(dim=1))
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    step = first * len(loader)
    if rank == 0:
        print("start after step", step, flush=True)
    for epoch in range(first, args.steps // len(loader)):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(args.pause)
            if rank == 0:
                print(f"step {step} loss {loss.item()}", flush=True)
        save(model, optimizer, epoch + 1, rank)
    weights, _ = full_state(model)
    if rank == 0:
        text = str([value.tolist() for value in weights.values()])
        print("final loss", loss.item(), "weights", hashlib.sha256(text.encode()).hexdigest()[:16], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(args.folder, exist_ok=True)
    mp.spawn(train, args=(args.world,), nprocs=args.world)
