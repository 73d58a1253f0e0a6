"""Workload with any optimizer, named in its arguments, on whole or sharded parameters."""

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
    """`optimizer`: `module:Class`; `options`: its arguments; `whole`: no sharding; `rows`: rows of the last matrix."""

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


class Stateful(AnyOptimizer):
    def __init__(self, config: Any, **args: Any) -> None:
        super().__init__(config, **args)
        self.count, self.mine, self.mean = 0, 1.0, torch.zeros(())

    def build_data(self, layout: Any) -> Any:
        self.mine += layout.dp_rank
        return super().build_data(layout)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.count += 1
        self.mine *= 1.01 + 0.01 * self.mine
        self.mean = 0.5 * self.mean + 0.1
        return super().loss(model, batch) * (1 + 0.1 * (self.count % 3)) / self.mine + self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mine": (self.mine,), "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, (self.mine,), self.mean = state["count"], state["mine"], state["mean"]


class Forgetful(AnyOptimizer):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return super().loss(model, batch)


class StatefulAndDropping(Stateful):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.dropout(torch.ones(8), 0.5).mean() * super().loss(model, batch)
