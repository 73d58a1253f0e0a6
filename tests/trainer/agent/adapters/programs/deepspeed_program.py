"""A DeepSpeed loop as a user writes it: `deepspeed_program.py FOLDER STEPS`."""

import os
import sys

import deepspeed
import torch

folder, steps, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=settings)
_, state = engine.load_checkpoint(folder)
for step in range(state["step"] if state else 0, steps):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
    engine.backward(((engine(x)[:, 0] - x.sum(1)) ** 2).mean())
    engine.step()
    if step == 4:
        engine.save_checkpoint(folder, client_state={"step": step + 1})
print("final", engine.global_steps, flush=True)
