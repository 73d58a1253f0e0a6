"""Attention around a ring (Liu et al. 2023): keys and values travel from rank to rank, queries stay.

Each rank has one chunk of the head and one of the tail of every sequence, so that with a causal mask all of them have
the same work in every turn; chunks of which the mask hides everything are skipped. Sums are taken in the same order in
every step.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.worker.context_parallel.block_attention import BlockResult, joined, kernel_for
from trainer.worker.context_parallel.peer_waits import waiting
from trainer.worker.context_parallel.ulysses import repeated
from trainer.worker.reporting.phase_tracker import current_tracker


class Visible(NamedTuple):
    """What a rank's queries see of another one's keys."""

    queries: slice
    keys: slice
    is_causal: bool


def visible(rank: int, source: int, tokens: int) -> Visible:
    """What the queries of `rank` see of the keys of `source`; each has `tokens`, half of them of the tail."""
    if source == rank:
        return Visible(slice(0, tokens), slice(0, tokens), is_causal=True)
    if source < rank:  # its head comes before both chunks, its tail after both
        return Visible(slice(0, tokens), slice(0, tokens // 2), is_causal=False)
    return Visible(slice(tokens // 2, tokens), slice(0, tokens), is_causal=False)


class Ring:
    """The ranks of a group in a circle: each sends to the next one and receives from the one before it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.rank = group.size(), dist.get_rank(group)
        self.sent_bytes = 0
        """Since the beginning."""
        self._group = group
        members = dist.get_process_group_ranks(group)
        self._next = members[(self.rank + 1) % self.ranks]
        self._previous = members[(self.rank - 1) % self.ranks]

    def pass_on(self, tensor: torch.Tensor) -> "Transfer":
        """Begin to send `tensor` and to receive one of its shape, while this rank computes."""
        received = torch.empty_like(tensor)
        self.sent_bytes += tensor.nbytes
        if (tracker := current_tracker()) is not None:
            tracker.message_begun()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self._next, self._group),
                dist.P2POp(dist.irecv, received, self._previous, self._group),
            ]
        )
        return Transfer(tensor, received, works, self._previous)

    def sources(self) -> Iterator[int]:
        """Whose keys and values are here in each turn: one's own, then those of the ranks before."""
        return ((self.rank - turn) % self.ranks for turn in range(self.ranks))


class Transfer(NamedTuple):
    """A message on its way; `sent` must live as long as it is."""

    sent: torch.Tensor
    received: torch.Tensor
    works: list[dist.Work]
    source: int  # rank of the world that sends

    def wait(self) -> torch.Tensor:
        """What has been received."""
        tracker = current_tracker()
        told = nullcontext() if tracker is None else tracker.waits_in_ring(self.source)
        with told, waiting(self.sent.device):
            for work in self.works:
                work.wait()
        return self.received


class RingAttention:
    """Causal attention over sequences of which each rank of `group` has a chunk of the head and one of the tail."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ring = Ring(group)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` [batch, heads, tokens, width], `key` and `value` perhaps of fewer heads; tokens of this rank."""
        mixed: torch.Tensor = _RingAttention.apply(query, key, value, self.ring)  # type: ignore[no-untyped-call]
        return mixed


def ring_of(model: nn.Module) -> Ring | None:
    """Around which keys and values of `model` travel; None: they do not."""
    found = (getattr(module, "attend", None) for module in model.modules())
    return next((attend.ring for attend in found if isinstance(attend, RingAttention)), None)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
        query, pair = query.contiguous(), torch.stack([key, value])
        whole = _forward(query, pair, ring)
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, pair, out, whole.log_sum_exp)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, pair, out, log_sum_exp = ctx.saved_tensors
        of_query, of_pair = _backward(given.contiguous(), query, pair, BlockResult(out, log_sum_exp), ctx.ring)
        of_key, of_value = of_pair.to(pair.dtype).unbind()
        return of_query.to(query.dtype), of_key, of_value, None


def _forward(query: torch.Tensor, pair: torch.Tensor, ring: Ring) -> BlockResult:
    """Over the keys and values of all ranks; `pair` [2, batch, heads, tokens, width] are one's own. In float32."""
    kernel, tokens, whole = kernel_for(query), query.shape[2], None
    for turn, source in enumerate(ring.sources()):
        transfer = ring.pass_on(pair) if turn < ring.ranks - 1 else None
        seen = visible(ring.rank, source, tokens)
        key, value = _for_heads(pair, seen.keys, query.shape[1])
        block = kernel.forward(query[:, :, seen.queries], key, value, is_causal=seen.is_causal)
        if whole is None:  # copies: what activation checkpointing has kept of a block must not change
            whole = BlockResult(block.out.to(torch.float32, copy=True), block.log_sum_exp.clone())
        else:
            _join(whole, seen.queries, block)
        if transfer is not None:
            pair = transfer.wait()
    assert whole is not None
    return whole


def _join(whole: BlockResult, rows: slice, block: BlockResult) -> None:
    """Add attention of some queries to more keys, in place."""
    result = joined(BlockResult(whole.out[:, :, rows], whole.log_sum_exp[:, :, rows]), block)
    whole.out[:, :, rows], whole.log_sum_exp[:, :, rows] = result


def _backward(
    given: torch.Tensor, query: torch.Tensor, pair: torch.Tensor, whole: BlockResult, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the query, and of the pair [2, ...]: these travel behind the pair, and end where it began."""
    kernel, tokens = kernel_for(query), query.shape[2]
    of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    travelling: Transfer | None = None
    sums = torch.zeros(pair.shape, dtype=torch.float32, device=pair.device)
    for turn, source in enumerate(ring.sources()):
        transfer = ring.pass_on(pair) if turn < ring.ranks - 1 else None
        seen = visible(ring.rank, source, tokens)
        key, value = _for_heads(pair, seen.keys, query.shape[1])
        part = BlockResult(whole.out[:, :, seen.queries], whole.log_sum_exp[:, :, seen.queries])
        given_here, query_here = given[:, :, seen.queries], query[:, :, seen.queries]
        found = kernel.backward(given_here, query_here, key, value, part, is_causal=seen.is_causal)
        of_query[:, :, seen.queries] += found.query
        if travelling is not None:
            sums = travelling.wait()
        for total, own in zip(sums, (found.key, found.value), strict=True):
            total[:, :, seen.keys] += _of_heads(own, total.shape[1])
        travelling = ring.pass_on(sums)
        if transfer is not None:
            pair = transfer.wait()
    assert travelling is not None
    return of_query, travelling.wait()


def _for_heads(pair: torch.Tensor, columns: slice, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these tokens, once for each of the query's heads."""
    key, value = (repeated(part[:, :, columns], heads // part.shape[1]) for part in pair)
    return key, value


def _of_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum, in float32, over the heads that have used the same keys and values."""
    by_head: torch.Tensor = gradient.float().unflatten(1, (heads, -1))
    return by_head.sum(dim=2)
