"""A loop with Accelerate in the style of its examples: `accelerate_program.py FOLDER STEPS`."""

import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

folder, steps = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=2)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
saved = sorted((int(name.split("_")[1]) for name in os.listdir(folder)), reverse=True)
done = saved[0] if saved else 0
if saved:
    accelerator.load_state(os.path.join(folder, f"step_{done}"))
per_epoch = len(data) // 2
for epoch in range(done // per_epoch, 1 << 30):
    skip = done % per_epoch if epoch == done // per_epoch else 0
    for (x,) in accelerator.skip_first_batches(data, skip * 2):
        with accelerator.accumulate(model):
            accelerator.backward(((model(x)[:, 0] - x.sum(1)) ** 2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            if done == 4:
                accelerator.save_state(os.path.join(folder, f"step_{done}"))
            if done == steps:
                break
    if done == steps:
        break
total = accelerator.gather(sum(one.double().sum() for one in model.parameters()).reshape(1))
accelerator.print("final", done, [float(one) for one in total], scheduler.get_last_lr(), flush=True)
