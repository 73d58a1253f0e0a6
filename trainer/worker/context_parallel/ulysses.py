"""Attention by exchange (DeepSpeed-Ulysses, Jacobs et al. 2023): all tokens of some heads on each rank.

Before attention every rank has some tokens of all heads; one all-to-all gives it all tokens of some heads, and another
one brings the results back.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from trainer.worker.context_parallel.peer_waits import waiting


class UlyssesAttention:
    """Causal attention over sequences that the ranks of `group` have in consecutive parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` [batch, heads, tokens, width], `key` and `value` perhaps of fewer heads; tokens of this rank."""
        ranks = self._group.size()
        repeats = math.lcm(key.shape[1], ranks) // key.shape[1]
        parts = [_by_rank(part, ranks) for part in (query, repeated(key, repeats), repeated(value, repeats))]
        sizes = [part.shape[2] for part in parts]
        received = self._exchange(torch.cat(parts, dim=2).movedim(1, 0))  # [rank with these tokens, batch, heads, ...]
        whole = received.movedim(0, 2).flatten(2, 3)
        own_query, own_key, own_value = whole.split(sizes, dim=1)
        mixed = functional.scaled_dot_product_attention(own_query, own_key, own_value, is_causal=True, enable_gqa=True)
        returned = self._exchange(mixed.unflatten(2, (ranks, -1)).movedim(2, 0))  # [rank with these heads, batch, ...]
        return returned.movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = _Exchange.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received


def repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Each head [batch, heads, tokens, width] so many times, one copy after the other; gradients of copies are added"""
    if times == 1:
        return heads
    batch, count, tokens, width = heads.shape
    return heads[:, :, None].expand(batch, count, times, tokens, width).reshape(batch, count * times, tokens, width)


def _by_rank(heads: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, heads, tokens, width] as [batch, ranks, heads of a rank, tokens, width]."""
    parts: torch.Tensor = heads.unflatten(1, (ranks, -1))
    return parts


class _Exchange(torch.autograd.Function):
    """Row r of the first dimension goes to rank r, and comes from it; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    with waiting(sent.device):
        dist.all_to_all_single(received, sent, group=group)
    return received
