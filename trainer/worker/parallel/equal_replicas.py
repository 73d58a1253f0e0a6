"""Whether replicas are equal: numbers of which all ranks must have the same bits."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from trainer.worker.parallel.gradient_buckets import CannotAverage
from trainer.worker.parallel.own_part import own_part

_MODULUS = 65_521
"""So small that the squares of a million ranks add up exactly in float64."""


def residue(number: torch.Tensor) -> torch.Tensor:
    """A number in float64 that two ranks share when they have the same bits of `number`, a float64 scalar."""
    return number.view(torch.int64).remainder(_MODULUS).double()


def are_equal(count: int, total: float, squares: float) -> bool:
    """Whether `count` residues with this sum, and this sum of squares, are all the same."""
    return count * squares == total * total


def require_equal(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Raise CannotAverage unless all ranks of the group have the same weights; collective."""
    tensors = (own_part(one).detach() for one in parameters.values())
    own = [one for one in tensors if one.numel() and (one.is_floating_point() or one.is_complex())]
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(own)])
    mark = residue((norms * torch.arange(1, len(norms) + 1, device=norms.device)).sum())
    sums = torch.stack([mark, mark * mark])
    dist.all_reduce(sums, group=group)
    if not are_equal(group.size(), *sums.tolist()):
        raise CannotAverage(
            "ranks begin with different weights, and parallel.strategy=ddp averages gradients alone: build the model "
            "from the same random numbers on every rank (orch has seeded them), or from the same file"
        )
