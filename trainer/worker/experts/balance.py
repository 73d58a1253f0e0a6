"""Moves the biases of all routers once a step, by the loads of the whole batch."""

from collections.abc import Iterable

import torch
from torch import nn

from trainer.worker.experts.router import Router


class ExpertBalance:
    """The routers of this rank's layers; a dense model has none.

    Loads have a row for each layer of the whole model. A rank of a pipeline fills in those of its own layers, so that
    the sum over all ranks has all of them.
    """

    def __init__(self, model: nn.Module, rows: Iterable[int] | None = None, layers: int | None = None) -> None:
        """`rows`: of this rank's layers, in the order of `model`, among all `layers`; None: it has all of them."""
        found = [module for module in model.modules() if isinstance(module, Router)]
        numbers = range(len(found)) if rows is None or not found else rows
        self._routers = dict(zip(numbers, found, strict=True))
        self.layers = 0 if not found else len(found) if layers is None else layers
        """How many of the whole model have experts."""

    def loads(self) -> torch.Tensor | None:
        """Tokens of every expert on this rank since the last step, row by row, float64; to be summed over ranks."""
        if not self._routers:
            return None
        of_others = torch.zeros_like(next(iter(self._routers.values())).load)
        rows = [self._routers[row].load if row in self._routers else of_others for row in range(self.layers)]
        return torch.cat(rows).double()

    def step_ended(self, loads: torch.Tensor | None, *, moves: bool) -> None:
        """Begin to count anew; `loads`: those of all ranks. `moves`: whether the optimizer has stepped."""
        if loads is None:
            return
        rows = loads.view(self.layers, -1)
        for row, router in self._routers.items():
            router.load.zero_()
            if moves:
                router.balance(rows[row])
