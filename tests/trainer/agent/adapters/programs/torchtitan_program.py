"""The steps of torchtitan's trainer around its own CheckpointManager: `torchtitan_program.py FOLDER STEPS`."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager


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


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())
trainer, mode = Trainer(), sys.argv[3] if len(sys.argv) > 3 else "disabled"
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
checkpointer = CheckpointManager(
    CheckpointManager.Config(enable=True, folder=sys.argv[1], interval=1000, keep_latest_k=0, async_mode=mode),
    dataloader=None, model_parts=[model], optimizers=Optimizers(optimizer, model), lr_schedulers=schedule,
    states={"train_state": trainer}, sd_adapter=None,
)  # fmt: skip
checkpointer.states.pop("dataloader")
checkpointer.load(step=-1)
steps = int(sys.argv[2])
while trainer.step < steps:
    trainer.step += 1
    checkpointer.maybe_wait_for_staging()
    optimizer.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(trainer.step * 9 + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    schedule.step()
    checkpointer.save(trainer.step, last_step=trainer.step == steps)
total = sum(one.full_tensor().double().sum() for one in model.parameters()).item()
print("final", trainer.step, total, flush=True)
checkpointer.close()
dist.destroy_process_group()
