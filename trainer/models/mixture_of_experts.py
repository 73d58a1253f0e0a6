"""Mixture of experts: router, load balancing, and experts.

As in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and Wang et al. 2024 (arXiv 2408.15664): a bias for each expert is
added to its scores when experts are chosen, but not when their outputs are weighted. After each step, the bias moves by
a fixed rate: up for an expert that had fewer tokens than the mean, and down for one that had more.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainer.parallel.apply.expert_parallel import (
    BalancedRouter,
    ExpertStacks,
    inverse,
    own_weight,
    permute_rows,
)
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig


class Experts(ExpertStacks):
    """SwiGLU (Shazeer 2020) for each expert; all matrices are [experts, inner width, width]."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        shape = (config.count, config.ffn_dim, dim)
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Apply this rank's experts to `rows` [rows, width], sorted by expert; `counts`: rows per expert."""
        # The gradient of `unbind` is one stack; indexing each expert would sum whole stacks.
        matrices = (own_weight(weight).unbind() for weight in (self.w1, self.w2, self.w3))
        parts = zip(rows.split(list(counts)), *matrices, strict=True)
        return torch.cat(
            [functional.linear(functional.silu(part @ w1.T) * (part @ w3.T), w2.T) for part, w1, w2, w3 in parts]
        )


class Routing(NamedTuple):
    """Routing of tokens: indices and weights of their experts, both [tokens, experts per token]."""

    experts: torch.Tensor
    weights: torch.Tensor
    load: torch.Tensor
    """Tokens per expert, int64 [experts]."""


class Router(BalancedRouter):
    """Linear router whose scores are sigmoids, or a softmax over all experts, in float32."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.per_token, self.rate, self.is_softmax = config.per_token, config.balance_rate, config.scores == "softmax"
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.register_buffer("moves", torch.empty(config.count, dtype=torch.int64))
        self.register_buffer("load", torch.empty(config.count, dtype=torch.int64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Routing:
        """Choose experts for `tokens` [tokens, dim]."""
        outputs = functional.linear(tokens.float(), own_weight(self.weight).float())
        scores = outputs.softmax(dim=-1) if self.is_softmax else outputs.sigmoid()
        chosen = (scores.detach() + self.rate * self.moves).topk(self.per_token, dim=-1).indices
        own = scores.gather(1, chosen)
        load = chosen.flatten().bincount(minlength=len(self.load))
        weights: torch.Tensor = _Counted.apply(  # type: ignore[no-untyped-call]
            own / own.sum(dim=-1, keepdim=True), load, self.load
        )
        return Routing(chosen, weights, load)


class _Counted(torch.autograd.Function):
    """Adds a load to a total in the backward pass, which runs once per micro-batch, unlike the forward pass."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, load: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.total = load, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.total += ctx.load
        return gradient, None, None


Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], torch.Tensor]
"""Function that computes rows, sorted by expert, on the ranks that hold the experts, given the rows per expert."""


def compute_here(rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Compute rows on this rank, which has all experts."""
    computed: torch.Tensor = experts(rows, load.tolist())
    return computed


class MixtureOfExperts(nn.Module):
    """Layer in which a few experts process each token; no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config.dim, config.experts)
        self.experts = Experts(config.dim, config.experts)
        self.dispatch: Dispatch = compute_here
        self.real: int | None = None
        """Number of leading tokens of a sequence that are not padding, or None for all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `x` [batch, length, width]; padding becomes zero."""
        real = x[:, : self.real]
        out = self._tokens(real.flatten(0, 1)).view(real.shape)
        return functional.pad(out, (0, 0, 0, x.shape[1] - real.shape[1]))

    def _tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        choice = self.router(tokens)
        each = choice.experts.shape[1]
        order = choice.experts.flatten().argsort(stable=True)
        # Reordered copies of the rows are never named, so each is freed as soon as the next copy exists.
        rows = permute_rows(tokens[:, None].expand(-1, each, -1).flatten(0, 1), order)
        parts = permute_rows(self.dispatch(rows, choice.load, self.experts), inverse(order)).unflatten(0, (-1, each))
        mixed: torch.Tensor = (parts.float() * choice.weights[..., None]).sum(dim=1)
        return mixed.to(tokens.dtype)
