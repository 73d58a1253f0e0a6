"""Moves the biases of all routers once a step, by the loads of the whole batch."""

import torch
from torch import nn

from trainer.worker.experts.router import Router


class ExpertBalance:
    """The routers of a model, in its order; a dense model has none."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]

    @property
    def layers(self) -> int:
        """How many of them have experts."""
        return len(self._routers)

    def loads(self) -> torch.Tensor | None:
        """Tokens of every expert on this rank since the last step, layer by layer, float64; to be summed over ranks."""
        return torch.cat([router.load for router in self._routers]).double() if self._routers else None

    def step_ended(self, loads: torch.Tensor | None, *, moves: bool) -> None:
        """Begin to count anew; `loads`: those of all ranks. `moves`: whether the optimizer has stepped."""
        if loads is None:
            return
        sizes = [len(router.load) for router in self._routers]
        for router, load in zip(self._routers, loads.split(sizes), strict=True):
            router.load.zero_()
            if moves:
                router.balance(load)
