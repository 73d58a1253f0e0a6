"""Mixture of experts: router, load balancing, and experts.

As in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and Wang et al. 2024 (arXiv 2408.15664): a bias for each expert is
added to its scores when experts are chosen, but not when their outputs are weighted. After each step it moves up or
down by a fixed rate for an expert that had fewer or more tokens than the mean.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from trainer.contract.config import ModelConfig
from trainer.contract.config_sections.parallel_config import ExpertsConfig


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows[order]`, where `order` contains each row once."""
    moved: torch.Tensor = _Permuted.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call]
    return moved


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation of `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class _Permuted(torch.autograd.Function):
    """Gathers in both directions: torch's backward would add gradients, in nondeterministic order on GPUs."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class Experts(nn.Module):
    """SwiGLU (Shazeer 2020) for each expert; all matrices are [experts, inner width, width]."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        shape = (config.count, config.ffn_dim, dim)
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Compute `rows` [rows, width], sorted by this rank's experts, with `counts` rows for each."""
        # The gradient of `unbind` is one stack; indexing each expert would sum whole stacks.
        matrices = (own_weight(weight).unbind() for weight in (self.w1, self.w2, self.w3))
        parts = zip(rows.split(list(counts)), *matrices, strict=True)
        return torch.cat(
            [functional.linear(functional.silu(part @ w1.T) * (part @ w3.T), w2.T) for part, w1, w2, w3 in parts]
        )


def own_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part for its own tokens; the gradient of a replicated weight is a sum over ranks."""
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=placements)


class Routing(NamedTuple):
    """Routing of tokens: numbers and weights of their experts, both [tokens, experts of a token]."""

    experts: torch.Tensor
    weights: torch.Tensor
    load: torch.Tensor
    """Tokens per expert, int64 [experts]."""


class Router(nn.Module):
    """A linear layer whose scores are sigmoids in float32."""

    same_on_all_ranks = ("moves",)
    """Buffers stored once per checkpoint: a pipeline stage restores them from any rank that saved."""
    moves: torch.Tensor
    """Net moves of each expert's bias, in units of the rate. An integer: its sums are exact in any order."""
    load: torch.Tensor
    """Tokens of each expert since the last optimizer step, counted in this rank's backward passes."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.per_token, self.rate = config.per_token, config.balance_rate
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.register_buffer("moves", torch.empty(config.count, dtype=torch.int64))
        self.register_buffer("load", torch.empty(config.count, dtype=torch.int64), persistent=False)

    def reset(self, device: torch.device) -> None:
        """Reset to the state of step 0."""
        self.moves = torch.zeros_like(self.moves, device=device)
        self.load = torch.zeros_like(self.load, device=device)

    def forward(self, tokens: torch.Tensor) -> Routing:
        """Choose experts for `tokens` [tokens, dim]."""
        scores = functional.linear(tokens.float(), own_weight(self.weight).float()).sigmoid()
        chosen = (scores.detach() + self.rate * self.moves).topk(self.per_token, dim=-1).indices
        own = scores.gather(1, chosen)
        load = chosen.flatten().bincount(minlength=len(self.load))
        weights: torch.Tensor = _Counted.apply(  # type: ignore[no-untyped-call]
            own / own.sum(dim=-1, keepdim=True), load, self.load
        )
        return Routing(chosen, weights, load)

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Update the bias after a step in which the experts had `load` tokens [experts] over all ranks."""
        self.moves += (load.sum() - load * len(load)).sign().to(self.moves.dtype)


class _Counted(torch.autograd.Function):
    """Adds a load to a total in the backward pass: once per micro-batch, however often the forward pass runs.

    Neither the recomputation of activation checkpointing nor validation has a backward pass of its own.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, load: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.total = load, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.total += ctx.load
        return gradient, None, None


class ExpertBalance:
    """The routers of this rank's layers; a dense model has none.

    Loads have a row for each layer of the whole model. A pipeline rank fills in the rows of its own layers, so that the
    sum over all ranks is complete.
    """

    def __init__(self, model: nn.Module, rows: Iterable[int] | None = None, layers: int | None = None) -> None:
        """`rows`: indices of this rank's layers in the order of `model`, among all `layers`; None: all of them."""
        found = [module for module in model.modules() if isinstance(module, Router)]
        numbers = range(len(found)) if rows is None or not found else rows
        self._routers = dict(zip(numbers, found, strict=True))
        self.layers = 0 if not found else len(found) if layers is None else layers
        """Number of layers with experts in the whole model."""

    def loads(self) -> torch.Tensor | None:
        """Return this rank's tokens per expert since the last step, row by row, float64; to be summed over ranks."""
        if not self._routers:
            return None
        of_others = torch.zeros_like(next(iter(self._routers.values())).load)
        rows = [self._routers[row].load if row in self._routers else of_others for row in range(self.layers)]
        return torch.cat(rows).double()

    def step_ended(self, loads: torch.Tensor | None, *, moves: bool) -> None:
        """Reset the counts; `loads`: sums over all ranks. `moves`: whether the optimizer has stepped."""
        if loads is None:
            return
        rows = loads.view(self.layers, -1)
        for row, router in self._routers.items():
            router.load.zero_()
            if moves:
                router.balance(rows[row])


Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], torch.Tensor]
"""Computes rows, sorted by expert, on the ranks that have the experts; takes the number of rows per expert."""


def compute_here(rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Compute rows on this rank, which has all experts."""
    computed: torch.Tensor = experts(rows, load.tolist())
    return computed


class MixtureOfExperts(nn.Module):
    """Computes each token with a few experts; no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config.dim, config.experts)
        self.experts = Experts(config.dim, config.experts)
        self.dispatch: Dispatch = compute_here
        self.real: int | None = None
        """Number of leading tokens of a sequence that are not padding; None: all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `x` [batch, length, width]; padding becomes zero."""
        real = x[:, : self.real]
        out = self._tokens(real.flatten(0, 1)).view(real.shape)
        return functional.pad(out, (0, 0, 0, x.shape[1] - real.shape[1]))

    def _tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        choice = self.router(tokens)
        each = choice.experts.shape[1]
        order = choice.experts.flatten().argsort(stable=True)
        # Without names, so that reordered copies of all rows are freed at once.
        rows = permute_rows(tokens[:, None].expand(-1, each, -1).flatten(0, 1), order)
        parts = permute_rows(self.dispatch(rows, choice.load, self.experts), inverse(order)).unflatten(0, (-1, each))
        mixed: torch.Tensor = (parts.float() * choice.weights[..., None]).sum(dim=1)
        return mixed.to(tokens.dtype)
