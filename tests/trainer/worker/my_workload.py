"""User workloads with dropout, own data and an own optimizer."""

import os
import sys
import weakref

import torch
from torch import nn

from trainer.worker.reporting import metrics
from trainer.worker.workload import BaseWorkload


class Points:
    def __init__(self, rank: int, of: int) -> None:
        self.rank, self.of, self.consumed = rank, of, 0

    def take(self):
        generator = torch.Generator().manual_seed(self.consumed + self.rank)
        self.consumed += self.of
        x = torch.randn(16, 4, generator=generator, device="cpu")
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


class Compared(Plane):
    def build_data(self, layout):
        metrics.EVERY = 3
        return super().build_data(layout)


class Hidden(Plane):
    def build_model(self):
        self.losses = []
        return super().build_model()

    def loss(self, model, batch):
        self.losses.append(super().loss(model, batch))
        return self.losses[-1] + 0.1 * len(self.losses)


class Epochs:
    """Position within an epoch of four batches; restarts before (`early`) or after a batch is taken."""

    def __init__(self, *, early: bool = True, length: int = 4) -> None:
        self.early, self.length, self.epoch, self.consumed = early, length, 0, 0

    def take(self) -> list[tuple[int, int]]:
        self._begin(self.early)
        batch = (self.epoch, self.consumed)
        self.consumed += 1
        self._begin(not self.early)
        return [batch]

    def _begin(self, now: bool) -> None:
        if now and self.consumed == self.length:
            self.epoch, self.consumed = self.epoch + 1, 0

    def seek(self, consumed: int) -> None:
        self.consumed = consumed

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.consumed}

    def load_state_dict(self, state):
        self.epoch, self.consumed = state["epoch"], state["at"]


class InEpochs(Plane):
    def build_data(self, layout):
        return Epochs()

    def loss(self, model, batch):
        epoch, place = batch
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(100 * epoch + place))
        return super().loss(model, (x, x.sum(dim=1, keepdim=True)))


class Forgetful(Hidden):
    """Rank 1 alone changes a workload attribute in every step and a model attribute in the fourth."""

    def build_data(self, layout):
        self.rank, self.count = layout.rank, 0
        return super().build_data(layout)

    def loss(self, model, batch):
        if self.rank == 1:
            self.count += 1
            if self.count == 4:
                model[3].out_features = 2
        return super().loss(model, batch)


class Uneven(Plane):
    def build_model(self):
        model = super().build_model()
        model.add_module("statistics", nn.BatchNorm1d(1))
        model.unused = nn.Linear(3, 3)
        model.forward = lambda x: model.statistics(model[3](model[2](model[1](model[0](x)))))
        return model

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        return super().loss(model, batch) + model.statistics.running_mean.square().sum()


class Counters(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("turned", torch.zeros(4, dtype=torch.complex64))

    def forward(self, x):
        if self.training:
            self.seen += (x > 0).sum(dim=0)
            self.turned += torch.polar(torch.ones(4), x.sum(dim=0))
        return x * (1 + self.seen / 100 + self.turned.abs() / 10)


class CountsByRank(Plane):
    def build_model(self):
        return nn.Sequential(Counters(), *super().build_model())


class Viewing(Plane):
    def build_model(self):
        width = self.args["width"]
        flat = nn.Sequential(nn.Linear(4, width), nn.Flatten(1))
        return nn.Sequential(nn.Unflatten(1, (1, 4)), flat, nn.ReLU(inplace=True), Squeezed(width))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).sub_(y.squeeze(1)), torch.zeros(len(x)))


class Squeezed(nn.Linear):
    def __init__(self, width):
        super().__init__(width, 1)

    def forward(self, x):
        return super().forward(x).squeeze(1)


class Ending(Plane):
    """Data that ends silently after three steps."""

    def build_data(self, layout):
        data = super().build_data(layout)
        take = data.take
        data.take = lambda: take() if data.consumed < 3 else []
        return data


class Forking(Plane):
    def build_data(self, layout):
        helpers = [os.fork()]
        if not helpers[0]:
            sys.exit(3)
        helpers.append(os.fork())
        if not helpers[1]:
            raise RuntimeError("the helper died")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in helpers]
        if codes != [3, 1]:
            raise RuntimeError(f"helpers ended with {codes}")
        return super().build_data(layout)


class DroppedState(Plane):
    """The optimizer raises if dropped state is still referenced at the first training step."""

    def build_optimizer(self, model):
        return WatchedAdam(model.parameters(), lr=0.01)


PRIMED = []


class WatchedAdam(torch.optim.Adam):
    def step(self, closure=None):
        kept = {id(tensor) for held in self.state.values() for tensor in held.values()}
        if left := [ref for ref in PRIMED if ref() is not None and id(ref()) not in kept]:
            raise RuntimeError(f"{len(left)} tensors that were dropped are still held")
        super().step(closure)
        if not PRIMED:
            PRIMED.extend(weakref.ref(tensor) for held in self.state.values() for tensor in held.values())


class Branches(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 1) for name in names})

    def forward(self, x, names):
        return sum(self.parts[name](x) for name in names)


class Experts(Plane):
    """Each rank uses another expert of the same shape in each step, which torch does not detect."""

    def build_model(self):
        return Branches("0", "1")

    def build_data(self, layout):
        self.rank, self.step = layout.rank, 0
        return super().build_data(layout)

    def loss(self, model, batch):
        (x, y), self.step = batch, self.step + 1
        expert = (self.rank + self.step) % 2
        return nn.functional.mse_loss(model(x, [str(expert)]), y)


class HalvedPoints(Points):
    def take(self):
        ((x, y),) = super().take()
        return [(x[:8], y[:8], False), (x[8:], y[8:], True)]


class Thawing(Plane):
    def build_model(self):
        model = nn.Sequential(nn.Linear(4, self.args["width"]), nn.Tanh(), nn.Linear(self.args["width"], 1))
        model[0].requires_grad_(False)
        self.taken = 0
        return model

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        self.taken += 1
        if self.taken == 3:
            model[0].requires_grad_(True)
        if self.taken >= 5:
            of_ranks = [torch.zeros_like(model[0].weight) for _ in range(2)]
            torch.distributed.all_gather(of_ranks, model[0].weight.detach())
            assert torch.equal(*of_ranks)
        return super().loss(model, batch)


class AddsAGroup(Plane):
    """Unfreezes layers with a new parameter group: in the third step, or in the validation after it."""

    def build_optimizer(self, model):
        self.optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.01)
        return self.optimizer

    def build_data(self, layout):
        self.data = super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        if self.data.consumed == 3 and self.args["adds_in"] == "loss":
            self.optimizer.add_param_group({"params": list(model[0].parameters())})
        return super().loss(model, batch)

    def validate(self, model):
        if self.args["adds_in"] == "validate":
            self.optimizer.add_param_group({"params": list(model[0].parameters())})
        return {}


class Thaws(AddsAGroup):
    """Unfreezes layers in a way that survives a restart."""

    def build_optimizer(self, model):
        late = {"params": list(model[0].parameters()), "lr_scale": 0.0}
        self.optimizer = torch.optim.AdamW([{"params": list(model[3].parameters())}, late], lr=0.01)
        return self.optimizer

    def loss(self, model, batch):
        if self.data.consumed == 3:
            self.optimizer.param_groups[1]["lr_scale"] = 1.0
        return Plane.loss(self, model, batch)


class Container(Plane):
    def build_model(self):
        return nn.ModuleDict({"body": nn.Linear(4, self.args["width"]), "head": nn.Linear(self.args["width"], 1)})

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model["head"](model["body"](x)), y)


class Adapted(nn.Module):
    """Like peft: the called module is inside the child, not the child."""

    def __init__(self, inner):
        super().__init__()
        self.base_model = nn.Sequential(inner)

    def forward(self, x):
        return self.base_model[0](x)


class Bypassing(Plane):
    def build_model(self):
        return Adapted(super().build_model())


class BecomesNaN(Plane):
    def build_model(self):
        model = super().build_model()
        model.aside = nn.Parameter(torch.zeros(3))
        return model

    def loss(self, model, batch):
        if torch.is_grad_enabled() and self.args["at"] == (seen := getattr(self, "seen", 0) + 1):
            model.aside.data.fill_(float("nan"))
        self.seen = seen
        return super().loss(model, batch)


class OddFigures(Plane):
    flops_per_step = "many"


class Overflows(Plane):
    """Losses, or only gradients (steps `at`), that float16 cannot represent."""

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def build_data(self, layout):
        self.data = super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        x, y = batch
        loss = nn.functional.mse_loss(out := model(x), y.to(out.dtype))
        if self.data.consumed in self.args.get("at", ()):
            return loss + 60000.0 * (loss - loss.detach())  # the gradients alone
        return loss * torch.tensor(60000.0 if self.data.consumed == 3 and "at" not in self.args else 1.0).to(loss) ** 2


class OverflowsForGood(Overflows):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 if self.data.consumed < 3 else float("nan"))


class Validated(Plane):
    """Calls `at` with the number of each batch."""

    def __init__(self, config, **args):
        super().__init__(config, **args)
        self.at = lambda number: None

    def build_data(self, layout):
        self.data = super().build_data(layout)
        return self.data

    def loss(self, model, batch):
        self.at(self.data.consumed)
        return super().loss(model, batch)

    def validate(self, model):
        return {"batches": float(self.data.consumed)}
