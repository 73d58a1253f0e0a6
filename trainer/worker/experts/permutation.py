"""Rows in another order, and back, with gradients whose sums have one order."""

from typing import Any

import torch


def permuted(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`rows[order]`, where `order` names each row once."""
    moved: torch.Tensor = _Permuted.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call]
    return moved


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The order that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class _Permuted(torch.autograd.Function):
    """Gathers in both directions: torch would add the gradients up, on GPUs in any order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None
