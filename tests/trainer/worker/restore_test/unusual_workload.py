"""Workloads with state outside checkpoints, or on nodes that differ."""

import os
from typing import Any

import torch
from torch import nn

from tests.trainer.worker.unusual_state.cases import Usual
from trainer.models.built_in import LlamaWorkload


class Forgetful(Usual):
    """Promises equal steps, but its loss depends on a list that no checkpoint has."""

    def build_model(self) -> nn.Module:
        self.losses = list[torch.Tensor]()
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.losses.append(super().loss(model, batch))
        return self.losses[-1] + 0.1 * len(self.losses)


class OnNodes(LlamaWorkload):
    """Trains with the CPU settings `args["cpus"]` by rank; the optimizer of rank `args["odd"]` has two groups."""

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
        return OwnScaler(groups, lr=0.01)

    def build_data(self, layout: Any) -> Any:
        os.environ["ONEDNN_CPU"] = self.args["cpus"][layout.rank]
        return super().build_data(layout)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(model, batch) * float(self.args.get("scale", 1.0))


class OwnScaler(torch.optim.AdamW):
    """Counts its calls in its group and skips every third step, as after an overflow."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        if self.param_groups[0]["calls"] % 3:
            super().step(closure)
