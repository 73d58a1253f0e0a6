"""A workload of a user's own that is healthy and looks odd: `args["kind"]` chooses in what way.

It keeps what it promises: equal state gives equal steps, and its data has a fingerprint.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.trainer.worker.my_workload import Plane, Points
from trainer.models.built_in import LlamaWorkload

WIDTH = 6
INFINITY = float("inf")


class NamedPoints(Points):
    fingerprint = "points"


class Unusual(Plane):
    strictly_deterministic = True

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        ODD_MODELS.get(self.args["kind"], lambda model: None)(model)
        return model

    def parallelize(self, model: nn.Module, layout: Any) -> nn.Module:
        return super().parallelize(model, layout) if layout.sizes["dp_shard"] > 1 else model.to(layout.device)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return OPTIMIZERS.get(self.args["kind"], adamw)(trained)

    def build_data(self, layout: Any) -> Points:
        return NamedPoints(layout.dp_rank, layout.dp_size)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        odd = ODD_OUTPUTS.get(self.args["kind"])
        out = model(x.to(next(model.parameters()).dtype))
        out = odd(model, out) if odd else out
        return nn.functional.mse_loss(out.float(), y)


class WithDropout(Unusual):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(nn.functional.dropout(model(x), 0.5), y)


class Forgetful(Unusual):
    """It does not keep what it promises: its loss depends on a list that no checkpoint has."""

    def build_model(self) -> nn.Module:
        self.losses = list[torch.Tensor]()
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.losses.append(super().loss(model, batch))
        return self.losses[-1] + 0.1 * len(self.losses)


class OnNodes(LlamaWorkload):
    """Trains on nodes with the CPU settings `args["cpus"]`, by rank; `args["scale"]` multiplies the loss.

    The optimizer of rank `args["odd"]` has two groups.
    """

    def __init__(self, config: Any, **args: Any) -> None:
        super().__init__(config)
        self.args = args

    def parallelize(self, model: nn.Module, layout: Any) -> Any:
        self.rank = layout.rank
        return super().parallelize(model, layout)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups: list[Any] = list(model.parameters())
        if self.rank == self.args.get("odd"):
            groups = [{"params": groups[:1]}, {"params": groups[1:]}]
        return OwnScaler(groups)

    def build_data(self, layout: Any) -> Any:
        os.environ["ONEDNN_CPU"] = self.args["cpus"][layout.rank]
        return super().build_data(layout)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(model, batch) * float(self.args.get("scale", 1.0))


# -- optimizers


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Counting(torch.optim.AdamW):
    """Counts its calls in its group, as a scaler of the user's own does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["calls"] = 0

    def count(self) -> int:
        self.param_groups[0]["calls"] += 1
        calls: int = self.param_groups[0]["calls"]
        return calls


class OwnScaler(Counting):
    """Leaves out every third step, as after an overflow."""

    def step(self, closure: Any = None) -> None:
        if self.count() % 3:
            super().step(closure)


class Accumulating(Counting):
    """Updates after every second batch."""

    def step(self, closure: Any = None) -> None:
        if self.count() % 2 == 0:
            super().step(closure)


class TwoUpdates(Counting):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        super().step(closure)


def at_step_1000(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With the state of another program, which had trained 1000 steps."""
    made = torch.optim.AdamW(parameters, lr=0.01)
    for parameter in parameters:
        like = torch.zeros_like(parameter)
        made.state[parameter] = {"step": torch.tensor(1000.0), "exp_avg": like, "exp_avg_sq": like.clone() + 0.1}
    return made


def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:], "betas": (0.5, 0.9)}])


def matrices(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2])


def of(path: str, **options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    module, _, name = path.partition(":")
    return lambda parameters: getattr(importlib.import_module(module), name)(parameters, **options)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": of("torch.optim:SGD", lr=0.05),
    "momentum": of("torch.optim:SGD", lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": of("torch.optim:Adagrad"),
    "rmsprop": of("torch.optim:RMSprop", centered=True, momentum=0.5),
    "adamax": of("torch.optim:Adamax"),
    "nadam": of("torch.optim:NAdam"),
    "radam": of("torch.optim:RAdam"),
    "rprop": of("torch.optim:Rprop"),
    "asgd": of("torch.optim:ASGD"),
    "adadelta": of("torch.optim:Adadelta"),
    "adafactor": of("torch.optim:Adafactor"),
    "amsgrad": of("torch.optim:AdamW", amsgrad=True, maximize=False),
    "lion": of("lion_pytorch:Lion", lr=1e-3),
    "schedulefree-adamw": of("schedulefree:AdamWScheduleFree"),
    "schedulefree-sgd": of("schedulefree:SGDScheduleFree"),
    "prodigy": of("prodigyopt:Prodigy"),
    "muon": matrices,
    "own-scaler": OwnScaler,
    "accumulating": Accumulating,
    "two-updates": TwoUpdates,
    "at-step-1000": at_step_1000,
    "groups": groups,
}


# -- models


def masked_parameter(model: nn.Module) -> None:
    mask = torch.zeros(WIDTH).masked_fill(torch.arange(WIDTH) > 3, -INFINITY)
    model.register_parameter("mask", nn.Parameter(mask, requires_grad=False))


def trained_mask(model: nn.Module) -> None:
    model.register_parameter("bias", nn.Parameter(torch.tensor([0.0, 0.5, -INFINITY])))


def odd_buffers(model: nn.Module) -> None:
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
    model.register_buffer("nothing", None)
    model.register_buffer("empty", torch.empty(0, 3))


def unknown_values(model: nn.Module) -> None:
    model.register_buffer("padding", torch.full((3,), float("nan")))
    model.register_buffer("best", torch.tensor(INFINITY))


def scalar(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))


def unused(model: nn.Module) -> None:
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))


def weight_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def tied(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(torch.zeros(1))
    model.register_parameter("again", model[0].weight)


def doubles(model: nn.Module) -> None:
    model.double()


def halves(model: nn.Module) -> None:
    model.bfloat16()


def counter(model: nn.Module) -> None:
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))


ODD_MODELS: dict[str, Callable[[Any], None]] = {
    "frozen-mask": masked_parameter,
    "trained-mask": trained_mask,
    "odd-buffers": odd_buffers,
    "unknown-values": unknown_values,
    "scalar": scalar,
    "unused": unused,
    "weight-norm": weight_norm,
    "tied": tied,
    "float64": doubles,
    "bfloat16": halves,
    "counter": counter,
}


def count_calls(model: Any, out: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return out * (1.0 + 0.1 * (int(model.calls) % 3))


ODD_OUTPUTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "frozen-mask": lambda model, out: out + model.mask.softmax(0)[0],
    "trained-mask": lambda model, out: out * model.bias.softmax(0)[0],
    "scalar": lambda model, out: out * model.scale,
    "counter": count_calls,
}
