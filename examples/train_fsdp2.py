"""A loop of your own with FSDP2, which `orch` saves and continues exactly. It also runs with plain torchrun."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import orch

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])


class Sequences(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.cumsum(dim=0)


def main():
    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    data = orch.batches(DataLoader(Sequences(), batch_size=8, shuffle=True, num_workers=2))
    extra = {"data": data, "schedule": schedule}
    with orch.checkpointer(model, optimizer, extra, folder=FOLDER / "checkpoints", every=20) as checkpoints:
        step = checkpoints.restore()
        while step < STEPS and not orch.should_stop():
            x, y = next(data)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            orch.step(step, loss=loss)
            if orch.should_save() or step == STEPS:
                checkpoints.save(step)
    weights = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    if dist.get_rank() == 0 and step == STEPS:
        digest = hashlib.sha256(bytes(weights.view(torch.uint8).tolist())).hexdigest()
        (FOLDER / "final.json").write_text(json.dumps({"loss": loss.item(), "weights": digest}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
