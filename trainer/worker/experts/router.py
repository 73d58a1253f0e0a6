"""Chooses the experts of each token, and keeps their loads even without a loss of its own.

As in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and Wang et al. 2024 (arXiv 2408.15664): a bias for each expert is
added to its scores when experts are chosen, and not when their outputs are weighed. After each step it moves up or down
by one rate for an expert that had fewer or more tokens than the mean.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainer.contract.config_sections.experts_config import ExpertsConfig
from trainer.worker.experts.expert_weights import own_weight


class Choice(NamedTuple):
    """What tokens are given to: the experts' numbers and weights, both [tokens, experts of a token]."""

    experts: torch.Tensor
    weights: torch.Tensor
    load: torch.Tensor
    """Tokens of each expert, int64 [experts]."""


class Router(nn.Module):
    """A linear layer whose scores are sigmoids in float32."""

    same_on_all_ranks = ("moves",)
    """Buffers of which a checkpoint keeps one: a stage of a pipeline restores them from whichever ranks saved."""
    moves: torch.Tensor
    """By how many times the rate each expert's bias has moved. A whole number: its sums are exact in any order."""
    load: torch.Tensor
    """Tokens of each expert since the last optimizer step, of those whose backward pass this rank has computed."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.per_token, self.rate = config.per_token, config.balance_rate
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.register_buffer("moves", torch.empty(config.count, dtype=torch.int64))
        self.register_buffer("load", torch.empty(config.count, dtype=torch.int64), persistent=False)

    def reset(self, device: torch.device) -> None:
        """The state of step 0."""
        self.moves = torch.zeros_like(self.moves, device=device)
        self.load = torch.zeros_like(self.load, device=device)

    def forward(self, tokens: torch.Tensor) -> Choice:
        """Choose for `tokens` [tokens, dim]."""
        scores = functional.linear(tokens.float(), own_weight(self.weight).float()).sigmoid()
        chosen = (scores.detach() + self.rate * self.moves).topk(self.per_token, dim=-1).indices
        own = scores.gather(1, chosen)
        load = chosen.flatten().bincount(minlength=len(self.load))
        weights: torch.Tensor = _Counted.apply(  # type: ignore[no-untyped-call]
            own / own.sum(dim=-1, keepdim=True), load, self.load
        )
        return Choice(chosen, weights, load)

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Move the bias after a step in which the experts had `load` tokens [experts] over all ranks."""
        self.moves += (load.sum() - load * len(load)).sign().to(self.moves.dtype)


class _Counted(torch.autograd.Function):
    """Adds a load to a total when the gradient comes: once for each micro-batch, however often a forward pass runs.

    One that is computed again for activation checkpointing has no backward pass of its own, nor has validation.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, load: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.total = load, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.total += ctx.load
        return gradient, None, None
