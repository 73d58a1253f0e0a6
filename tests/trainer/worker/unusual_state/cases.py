"""Workloads with unusual state: each must be restored bit for bit, or refused by name.

`KEPT` are healthy ones, whose losses depend on what is unusual in them. `REFUSED` has for each refused one a part of
the message, and whether it can only be known at the first save.
"""

from typing import Any

import torch
from torch import nn

from tests.trainer.worker.my_workload import Points
from trainer.worker.workload import BaseWorkload


class NamedPoints(Points):
    fingerprint = "points"


class Usual(BaseWorkload):
    """A small network; cases replace its middle layer `odd`. Equal state gives equal steps."""

    strictly_deterministic = True

    def odd(self) -> nn.Module:
        return nn.Identity()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), self.odd(), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def build_data(self, layout: Any) -> Any:
        return NamedPoints(layout.dp_rank, layout.dp_size)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


KEPT: dict[str, type[Usual]] = {}
REFUSED: dict[str, tuple[type[Usual], str, bool]] = {}


def kept(case: type[Usual]) -> type[Usual]:
    KEPT[case.__name__] = case
    return case


def refused(words: str, *, at_save: bool = False) -> Any:
    def add(case: type[Usual]) -> type[Usual]:
        REFUSED[case.__name__] = (case, words, at_save)
        return case

    return add


def with_layer(name: str, layer: type[nn.Module], base: type[Usual] = Usual) -> type[Usual]:
    return type(name, (base,), {"odd": lambda self: layer(), "__module__": __name__})


class Layer(nn.Module):
    """A layer whose `scale()` depends on buffers that `seen()` changes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None: ...

    def seen(self, x: torch.Tensor) -> None: ...

    def scale(self) -> Any: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.training:
                self.seen(x)
            return_scale = self.scale()
        return x * (1.0 + 0.1 * return_scale)
