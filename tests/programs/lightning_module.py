"""A Lightning module and Trainer, as in its documentation. It saves every ten steps, and resumes from the last one."""

import argparse
import hashlib
import time

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--nodes", type=int, default=2)
parser.add_argument("--devices", type=int, default=2)
args = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self.net(x)[:, 0], y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Report(Callback):
    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            print("start after step", trainer.global_step, flush=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(args.pause)
        self.loss = outputs["loss"].item()
        if trainer.is_global_zero:
            print(f"step {trainer.global_step} loss {self.loss}", flush=True)


def main():
    lightning.seed_everything(0)
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=8)
    report, keep = Report(), ModelCheckpoint(dirpath=args.folder, every_n_train_steps=10, save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(
        max_steps=args.steps, accelerator="cpu", strategy="ddp", devices=args.devices, num_nodes=args.nodes,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[report, keep],
    )  # fmt: skip
    model = Net()
    trainer.fit(model, data, ckpt_path="last")
    if trainer.is_global_zero:
        weights = str([value.tolist() for value in model.state_dict().values()])
        print("final loss", report.loss, "weights", hashlib.sha256(weights.encode()).hexdigest()[:16], flush=True)


main()
