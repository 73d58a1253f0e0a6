"""The feed-forward of a layer with experts: route, sort by expert, compute, and add up."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from trainer.contract.config import ModelConfig
from trainer.worker.experts.expert_weights import Experts
from trainer.worker.experts.permutation import inverse, permuted
from trainer.worker.experts.router import Router

Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], torch.Tensor]
"""Has rows, sorted by expert, computed by those who have the experts; given how many rows each expert has."""


def compute_here(rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
    """This rank has all experts."""
    computed: torch.Tensor = experts(rows, load.tolist())
    return computed


class MixtureOfExperts(nn.Module):
    """Each token is computed by a few experts; no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config.dim, config.experts)
        self.experts = Experts(config.dim, config.experts)
        self.dispatch: Dispatch = compute_here
        self.real: int | None = None
        """How many tokens of a sequence are no padding, the first ones; None: all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [batch, length, width]; padding becomes zero."""
        real = x[:, : self.real]
        out = self._tokens(real.flatten(0, 1)).view(real.shape)
        return functional.pad(out, (0, 0, 0, x.shape[1] - real.shape[1]))

    def _tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        choice = self.router(tokens)
        each = choice.experts.shape[1]
        order = choice.experts.flatten().argsort(stable=True)
        # Without names, so that copies of all rows in another order are freed at once.
        rows = permuted(tokens[:, None].expand(-1, each, -1).flatten(0, 1), order)
        parts = permuted(self.dispatch(rows, choice.load, self.experts), inverse(order)).unflatten(0, (-1, each))
        mixed: torch.Tensor = (parts.float() * choice.weights[..., None]).sum(dim=1)
        return mixed.to(tokens.dtype)
