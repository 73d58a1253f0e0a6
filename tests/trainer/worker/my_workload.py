"""A user's own workload: a model built on the CPU, dropout, its own data, its own optimizer, learned with FSDP."""

import torch
from torch import nn

from trainer.worker.workload import BaseWorkload


class Points:
    """Noisy points on a plane; the position is the seed."""

    def __init__(self, rank: int, of: int) -> None:
        self.rank, self.of, self.consumed = rank, of, 0

    def take(self):
        generator = torch.Generator().manual_seed(self.consumed + self.rank)
        self.consumed += self.of
        x = torch.randn(16, 4, generator=generator)
        return [(x, x.sum(dim=1, keepdim=True))]

    def seek(self, consumed: int) -> None:
        self.consumed = consumed


class Plane(BaseWorkload):
    def build_model(self):
        return nn.Sequential(
            nn.Linear(4, self.args["width"]), nn.Tanh(), nn.Dropout(0.1), nn.Linear(self.args["width"], 1)
        )

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def build_data(self, layout):
        return Points(layout.dp_rank, layout.dp_size)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
