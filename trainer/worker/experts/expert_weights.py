"""The experts of a layer: their matrices are stacked, and each computes the rows that it is given."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from trainer.contract.config_sections.experts_config import ExpertsConfig


class Experts(nn.Module):
    """SwiGLU (Shazeer 2020) for each expert; all matrices are [experts, inner width, width]."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        shape = (config.count, config.ffn_dim, dim)
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`rows` [rows, width] in the order of the experts that this rank has, so many for each of them."""
        # Of `unbind` the gradient is one stack; of an index for each expert it would be a sum of whole stacks.
        matrices = (own_weight(weight).unbind() for weight in (self.w1, self.w2, self.w3))
        parts = zip(rows.split(list(counts)), *matrices, strict=True)
        return torch.cat(
            [functional.linear(functional.silu(part @ w1.T) * (part @ w3.T), w2.T) for part, w1, w2, w3 in parts]
        )


def own_weight(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part, to compute its own tokens with: the gradient of what several ranks have is a sum over them."""
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=placements)
