"""User workloads whose replicas would drift apart, and some that must not."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.trainer.worker.my_workload import HalvedPoints, Plane
from trainer.parallel.apply import gradient_buckets


class Replicas(Plane):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, self.args["width"]), nn.Tanh(), nn.Linear(self.args["width"], 1))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class Hooked(Replicas):
    def build_optimizer(self, model):
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.clamp_(-1e-3, 1e-3))
        return super().build_optimizer(model)


class HookedEarly(Replicas):
    def build_model(self):
        model = super().build_model()
        model[2].weight.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[1]) % 2))
        return model


class Kept(Replicas):
    def build_model(self):
        model = super().build_model()
        self.kept = list(model.parameters())
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * sum(one.square().sum() for one in self.kept)


class ForgottenRoot(Replicas):
    def parallelize(self, model, layout):
        fully_shard(model[0], mesh=layout.fsdp)
        return model


class LeftAsItIs(Replicas):
    def parallelize(self, model, layout):
        return model


class MadeLate(Replicas):
    def build_optimizer(self, model):
        model.extra = nn.Parameter(torch.ones(1))
        return super().build_optimizer(model)

    def loss(self, model, batch):
        return super().loss(model, batch) * model.extra.square().sum()


class OwnReplicas(Replicas):
    def parallelize(self, model, layout):
        return nn.parallel.DistributedDataParallel(model)


class AddedLater(Replicas):
    def parallelize(self, model, layout):
        model = super().parallelize(model, layout)
        wrapped = nn.Sequential(model)
        wrapped.extra = nn.Linear(1, 1)
        wrapped.forward = lambda x: wrapped.extra(model(x))
        return wrapped


class ReplacedLater(Replicas):
    taken = 0

    def build_optimizer(self, model):
        self.optimizer = super().build_optimizer(model)
        return self.optimizer

    def loss(self, model, batch):
        self.taken += 1
        if self.taken == 2:
            old, model[2].bias = model[2].bias, nn.Parameter(torch.zeros(1))
            for group in self.optimizer.param_groups:
                group["params"] = [model[2].bias if each is old else each for each in group["params"]]
        return super().loss(model, batch)


class OwnSteps(torch.optim.SGD):
    def step(self, closure=None):
        if self.batch is not None:
            nn.functional.mse_loss(self.model(self.batch[0]), self.batch[1]).backward()
        super().step()


class StepsByItself(Replicas):
    def build_optimizer(self, model):
        self.optimizer = OwnSteps(model.parameters(), lr=0.1)
        self.optimizer.model, self.optimizer.batch = model, None
        return self.optimizer

    def loss(self, model, batch):
        self.optimizer.batch = batch
        return super().loss(model, batch)


class OwnWeights(Replicas):
    def build_data(self, layout):
        self.dp_rank = layout.dp_rank
        return super().build_data(layout)

    def parallelize(self, model, layout):
        with torch.no_grad():
            model[0].weight += layout.dp_rank
        return super().parallelize(model, layout)


class OwnFreezing(Replicas):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def parallelize(self, model, layout):
        self.frozen = model[layout.dp_rank]
        return super().parallelize(model, layout)

    def loss(self, model, batch):
        self.frozen.requires_grad_(False)
        return super().loss(model, batch)


class UnusualModel(nn.Module):
    """Layers recomputed twice, frozen by turns, used by turns and unused, with integers and mixed precision."""

    def __init__(self, width, *, exact):
        super().__init__()
        self.twice, self.by_turns, self.late = nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(4, 1)
        self.head, self.unused = nn.Linear(width, 1), nn.Linear(8, 8)
        self.head.weight.faster = 20
        self.unused.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        if exact:
            self.unused.exact = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float64))])

    def forward(self, x, *, is_last):
        again = partial(checkpoint, self.twice, use_reentrant=False)
        x = again(again(x.requires_grad_()))
        self.by_turns.requires_grad_(not is_last)
        out = self.head(torch.tanh(self.by_turns(x)))
        return out + self.late(x) if is_last else out


class Unusual(Replicas):
    """Two micro-batches of a model whose parts are wrapped separately, with a bucket for each parameter."""

    def build_model(self):
        gradient_buckets.pack_buckets = lambda sizes: [[at] for at, _ in enumerate(list(sizes))]
        return UnusualModel(self.args["width"], exact=self.config.train.dtype == "float32")

    def parallelize(self, model, layout):
        for name, part in list(model.named_children()):
            setattr(model, name, super().parallelize(part, layout))
        return model

    def build_optimizer(self, model):
        trained = [one for one in model.parameters() if one.is_floating_point()]
        return torch.optim.AdamW([{"params": [one], "lr": 0.001 * getattr(one, "faster", 1)} for one in trained])

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    def build_data(self, layout):
        return HalvedPoints(layout.dp_rank, layout.dp_size)

    def loss(self, model, batch):
        x, y, is_last = batch
        return nn.functional.mse_loss(model(x, is_last=is_last).float(), y)


class Again(Replicas):
    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        again = partial(checkpoint, model[0], use_reentrant=True)
        model.forward = lambda x: model[1](again(again(x.requires_grad_())))
        return model
