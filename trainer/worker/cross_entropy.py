"""Cross-entropy of logits whose vocabulary is split over tensor-parallel ranks: no rank ever has all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens in float32; `logits` [tokens, vocabulary], a DTensor split by columns or whole."""
    if not isinstance(logits, DTensor):
        return functional.cross_entropy(logits.float(), targets, reduction="sum")
    mesh = logits.device_mesh
    part = logits.to_local()
    # The vocabulary is padded to a multiple of the ranks, so that all parts have the same width.
    first = mesh.get_local_rank() * part.shape[-1]
    total: torch.Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        part, targets, first, mesh.get_group()
    )
    return total


class _SplitCrossEntropy(torch.autograd.Function):
    """Each rank has the columns from `first` on; three small all-reduces stand for one large all-gather.

    log(sum(exp(x))) - x[target], as in Megatron-LM (Shoeybi et al. 2019, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        values = logits.float()
        highest = values.amax(dim=-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        exponentials = (values - highest[:, None]).exp_()
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        column = targets - first
        is_mine = (column >= 0) & (column < values.shape[-1])
        column = column.clamp(0, values.shape[-1] - 1)
        chosen = values.gather(1, column[:, None]).squeeze(1).masked_fill(~is_mine, 0.0)
        dist.all_reduce(chosen, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(exponentials.div_(total[:, None]), column, is_mine)
        ctx.dtype = logits.dtype
        return (total.log() + highest - chosen).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        share, column, is_mine = ctx.saved_tensors
        share = share.clone()
        share.scatter_add_(1, column[:, None], -is_mine.to(share.dtype)[:, None])
        return (share * gradient).to(ctx.dtype), None, None, None
