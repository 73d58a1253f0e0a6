"""A user's own workload with any optimizer, named in its arguments, on whole or on sharded parameters."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from my_workload import Plane
from torch import nn


def averaged(parameter: torch.Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


class AnyOptimizer(Plane):
    """`optimizer`: `module:Class`; `options`: its keywords; `whole`: nothing is sharded; `rows`: of the last matrix."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, self.args["rows"], bias=False))

    def parallelize(self, model: nn.Module, layout: Any) -> nn.Module:
        if not self.args.get("whole"):
            return super().parallelize(model, layout)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(averaged)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        module, _, name = self.args["optimizer"].partition(":")
        kind: Any = getattr(importlib.import_module(module), name)
        return kind(model.parameters(), **self.args.get("options", {}))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y.expand(-1, self.args["rows"]))
