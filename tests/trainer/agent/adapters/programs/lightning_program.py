"""A Lightning module as a user writes it: `lightning_program.py FOLDER STEPS`."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        (x,) = batch
        return ((self.net(x)[:, 0] - x.sum(1)) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    max_steps=int(sys.argv[2]), accelerator="cpu", strategy="ddp", devices=2, num_nodes=1, logger=False,
    enable_progress_bar=False, plugins=[SLURMEnvironment()],
    callbacks=[ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=1000)],
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=2))
print("final", trainer.global_step, flush=True)
