"""The steps of torchtitan's trainer around its own CheckpointManager, with FSDP2; it saves every ten steps."""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
args = parser.parse_args()


class Optimizers:
    """State of one optimizer, keyed by names of parameters as torchtitan's container does it."""

    def __init__(self, optimizer, model):
        self.optimizer, self.model = optimizer, model

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Trainer:
    """The counter of steps, which is part of a checkpoint."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer()
    checkpointer = CheckpointManager(
        CheckpointManager.Config(enable=True, folder=args.folder, interval=10, keep_latest_k=0),
        dataloader=None, model_parts=[model], optimizers=Optimizers(optimizer, model), lr_schedulers=schedule,
        states={"train_state": trainer}, sd_adapter=None,
    )  # fmt: skip
    checkpointer.states.pop("dataloader")
    checkpointer.load(step=-1)
    if rank == 0:
        print("start after step", trainer.step, flush=True)
    while trainer.step < args.steps:
        trainer.step += 1
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(trainer.step * world + rank))
        loss = F.mse_loss(model(x)[:, 0], x.sum(dim=1))
        loss.backward()
        optimizer.step()
        schedule.step()
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {trainer.step} loss {loss.item()}", flush=True)
        checkpointer.save(trainer.step, last_step=trainer.step == args.steps)
    weights = str([value.full_tensor().tolist() for value in model.parameters()])
    if rank == 0:
        print("final loss", loss.item(), "weights", hashlib.sha256(weights.encode()).hexdigest()[:16], flush=True)
    checkpointer.close()
    dist.destroy_process_group()


main()
