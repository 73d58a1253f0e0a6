"""Workloads with every hook: scheduler, validation, metrics, and data with a state."""

import random

import torch
from torch import nn

from tests.trainer.worker.my_workload import Plane, Uneven
from trainer.models.built_in import LlamaWorkload
from trainer.worker.workload import Mean, Rank0, Sum


class Shuffled:
    def __init__(self, rank: int, of: int) -> None:
        self.rank, self.of, self.epoch = rank, of, 0
        self.order: list[int] = []
        self.shuffle = random.Random(rank)
        self.noise = torch.full((3 + rank,), float(rank))

    def take(self):
        if not self.order:
            self.order, self.epoch = list(range(5)), self.epoch + 1
            self.shuffle.shuffle(self.order)
        self.noise = self.noise + 1.0
        generator = torch.Generator().manual_seed(self.order.pop() + 100 * self.epoch + 1000 * self.rank)
        x = torch.randn(8, 4, generator=generator) + 0.01 * self.noise.mean()
        return [(x, x.sum(dim=1, keepdim=True))]

    def state_dict(self):
        version, numbers, gauss = self.shuffle.getstate()
        shuffle = (version, list(numbers), gauss)
        return {"order": self.order, "epoch": self.epoch, "shuffle": shuffle, "noise": self.noise}

    def load_state_dict(self, state):
        self.order, self.epoch, self.noise = state["order"], state["epoch"], state["noise"]
        version, numbers, gauss = state["shuffle"]
        self.shuffle.setstate((version, tuple(numbers), gauss))


class Reshardable(Shuffled):
    def load_state_dicts(self, states):
        self.load_state_dict(states[self.rank % len(states)])
        self.seen = len(states)


class Hooked(Plane):
    def build_scheduler(self, optimizer):
        if self.args.get("plateau"):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)

    def build_data(self, layout):
        self.layout = layout
        return {"reshardable": Reshardable, "shuffled": Shuffled}[self.args.get("data", "shuffled")](
            layout.dp_rank, layout.dp_size
        )

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.newest, self.seen = loss.detach(), torch.tensor(len(batch[0]))
        return loss

    def metrics(self):
        found = {"own": self.newest, "samples": Sum(self.seen), "first": Rank0(self.layout.rank + 7.0)}
        found["weighted"] = Mean(float(self.layout.dp_rank), weight=1.0 + self.layout.dp_rank)
        found["rare"] = None
        return found

    def validate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(3)  # must not change the random numbers of training
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.layout.dp_rank))
        error = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        return {"val_loss": error, "worst": Sum(1.0)}


class Peaks(Hooked):
    """The best model is the one after `args.peak` validations, or scheduler steps without a plateau."""

    def build_scheduler(self, optimizer):
        self.scheduler = super().build_scheduler(optimizer)
        return self.scheduler

    def validate(self, model):
        return {**super().validate(model), "peak": -abs(self.scheduler.last_epoch - float(self.args["peak"]))}


class HookedLlama(LlamaWorkload):
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.config.train.steps)

    def build_data(self, layout):
        self.layout, self.data = layout, super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        self.newest = super().loss(model, batch).detach()
        return super().loss(model, batch)

    def metrics(self):
        return {"own": self.newest, "sequences": Sum(4)}

    def validate(self, model):
        rows = torch.arange(self.config.train.seq_len + 1).repeat(2, 1) % self.config.model.vocab_size
        return {"val_loss": super().loss(model, rows)}


class Frozen(Hooked, Uneven):
    def build_model(self):
        model = super().build_model()
        model[2].eval()
        return model

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        assert model.training
        assert not model[2].training
        return super().loss(model, batch)
