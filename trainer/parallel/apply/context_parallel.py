"""Context parallelism: sequence parts, Ulysses and ring attention.

Queries are [batch, heads, queries, width]; keys and values are [batch, heads, keys, width], with the same number of
heads.

Ulysses: before attention every rank has some tokens of all heads; an all-to-all gives it all tokens of some heads, and
another all-to-all returns the results.

Ring: the log-sum-exp of a query's scores determines the weight of a block relative to others (Milakov and Gimelshein
2018; Dao et al. 2022). The backward pass of a block takes the log-sum-exp and the output over all keys, and returns
the block's contribution. Each rank has one chunk from the head and one from the tail of every sequence, so with a
causal mask all ranks have equal work in every turn; fully masked chunks are skipped. Sums are taken in the same order
in every step.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.parallel.apply.mesh import Layout
from trainer.parallel.apply.sequence_part import SequenceAttention, SequencePart, causal_attention
from trainer.parallel.context import CONTEXT, CpMethod, chunks_per_rank, cp_method, padded_length
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig
from trainer.worker.reporting.phase_tracker import current_tracker, waiting_for_peers

_aten = torch.ops.aten
_FLASH_WIDTH = 8
"""CUDA's flash attention can be called directly if the head width is a multiple of this."""


class BlockResult(NamedTuple):
    """Result of one or more blocks: [batch, heads, queries, width], and [batch, heads, queries] in float32."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor


class Block(NamedTuple):
    """A block's queries, keys and values. If `is_causal`, query n sees keys up to n, else all keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of the query, key and value."""


class Kernel(Protocol):
    """Attention kernel for a block."""

    def forward(self, block: Block) -> BlockResult:
        """Compute attention over this block."""

    def backward(self, given: torch.Tensor, block: Block, whole: BlockResult) -> Gradients:
        """Return this block's share of the gradients; `given` is the gradient of `whole`, the output over all keys."""


def choose_kernel(query: torch.Tensor) -> Kernel:
    """Return a memory-efficient kernel if one supports this device, precision and width, else `Plain`."""
    if query.is_cpu:
        return CpuFlash()
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return CudaFlash() if is_half and query.shape[-1] % _FLASH_WIDTH == 0 else Plain()


class CpuFlash:
    """torch's flash attention on CPUs."""

    def forward(self, block: Block) -> BlockResult:
        query, key, value, is_causal = block
        return BlockResult(*_aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal))

    def backward(self, given: torch.Tensor, block: Block, whole: BlockResult) -> Gradients:
        query, key, value, is_causal = block
        found: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given, query, key, value, *whole, 0.0, is_causal
        )
        return found


class CudaFlash:
    """torch's flash attention on GPUs; not yet tested on a GPU."""

    def forward(self, block: Block) -> BlockResult:
        query, key, value, is_causal = block
        out, log_sum_exp, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
        return BlockResult(out, log_sum_exp)

    def backward(self, given: torch.Tensor, block: Block, whole: BlockResult) -> Gradients:
        query, key, value, is_causal = block
        unused = torch.zeros(2, dtype=torch.int64, device=query.device)  # random generators, unused without dropout
        found: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            given, query, key, value, whole.out, whole.log_sum_exp.contiguous(), None, None,
            query.shape[2], key.shape[2], 0.0, is_causal, unused, unused,
        )  # fmt: skip
        return found


class Plain:
    """Matrix products and an exponential in float32; holds all of a block's scores in memory."""

    def forward(self, block: Block) -> BlockResult:
        scores = _scores(block)
        log_sum_exp = scores.logsumexp(dim=-1)
        return BlockResult((scores - log_sum_exp[..., None]).exp().to(block.value.dtype) @ block.value, log_sum_exp)

    def backward(self, given: torch.Tensor, block: Block, whole: BlockResult) -> Gradients:
        query, key, value, _ = block
        weights = (_scores(block) - whole.log_sum_exp[..., None]).exp()
        upstream = given.float()
        of_weights = upstream @ value.float().mT - (upstream * whole.out.float()).sum(dim=-1, keepdim=True)
        of_scores = weights * of_weights * query.shape[-1] ** -0.5
        return of_scores @ key.float(), of_scores.mT @ query.float(), weights.mT @ upstream


def merge_blocks(one: BlockResult, other: BlockResult) -> BlockResult:
    """Combine attention to the keys of two blocks, in float32."""
    total = torch.logaddexp(one.log_sum_exp, other.log_sum_exp)
    first, second = (part.out.float() * (part.log_sum_exp - total).exp()[..., None] for part in (one, other))
    return BlockResult(first + second, total)


def _scores(block: Block) -> torch.Tensor:
    scores: torch.Tensor = block.query.float() @ block.key.float().mT * block.query.shape[-1] ** -0.5
    if block.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def sequence_part(length: int, parallel: ParallelConfig, method: CpMethod, rank: int) -> SequencePart:
    """Return the part of rank `rank`; in a ring, it has a chunk from each end of a sequence, so that work is equal."""
    ranks, each = parallel.cp, chunks_per_rank(method)
    chunk = padded_length(length, parallel, method) // (ranks * each)
    chunks = (rank, 2 * ranks - 1 - rank) if method is CpMethod.RING else (rank,)
    return SequencePart(length=length, ranks=ranks, chunk=chunk, chunks=chunks)


class UlyssesAttention(SequenceAttention):
    """Causal attention over sequences divided into consecutive parts among the ranks of `group`."""

    dimension = CONTEXT.name

    def __init__(self, group: dist.ProcessGroup, window: int = 0) -> None:
        self._group, self._window = group, window

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with `query` [batch, heads, tokens, width] of this rank; `key` and `value` may have fewer heads."""
        ranks = self._group.size()
        repeats = math.lcm(key.shape[1], ranks) // key.shape[1]
        parts = [
            _split_by_rank(part, ranks) for part in (query, repeat_heads(key, repeats), repeat_heads(value, repeats))
        ]
        sizes = [part.shape[2] for part in parts]
        received = self._exchange(torch.cat(parts, dim=2).movedim(1, 0))  # [rank with these tokens, batch, heads, ...]
        whole = received.movedim(0, 2).flatten(2, 3)
        own_query, own_key, own_value = whole.split(sizes, dim=1)
        mixed = causal_attention(own_query, own_key, own_value, self._window)
        returned = self._exchange(mixed.unflatten(2, (ranks, -1)).movedim(2, 0))  # [rank with these heads, batch, ...]
        return returned.movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = _AllToAll.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return received


def repeat_heads(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head of [batch, heads, tokens, width] `times` times in a row; gradients of the copies are added."""
    if times == 1:
        return heads
    batch, count, tokens, width = heads.shape
    return heads[:, :, None].expand(batch, count, times, tokens, width).reshape(batch, count * times, tokens, width)


def _split_by_rank(heads: torch.Tensor, ranks: int) -> torch.Tensor:
    """Reshape [batch, heads, tokens, width] to [batch, ranks, heads of a rank, tokens, width]."""
    parts: torch.Tensor = heads.unflatten(1, (ranks, -1))
    return parts


class _AllToAll(torch.autograd.Function):
    """Sends row r of the first dimension to rank r and receives a row from it; gradients take the reverse path."""

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
    with waiting_for_peers(sent.device):
        dist.all_to_all_single(received, sent, group=group)
    return received


class Visible(NamedTuple):
    """A rank's queries, and the keys of another rank that are visible to them."""

    queries: slice
    keys: slice
    is_causal: bool


def visible_slices(rank: int, source: int, tokens: int) -> Visible:
    """Return which queries of `rank` see which keys of `source`; each has `tokens`, half of them from the tail."""
    if source == rank:
        return Visible(slice(0, tokens), slice(0, tokens), is_causal=True)
    if source < rank:  # its head comes before both chunks, its tail after both
        return Visible(slice(0, tokens), slice(0, tokens // 2), is_causal=False)
    return Visible(slice(tokens // 2, tokens), slice(0, tokens), is_causal=False)


class Ring:
    """A ring of the ranks in a group: each sends to the next rank and receives from the previous one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.rank = group.size(), dist.get_rank(group)
        self.sent_bytes = 0
        """Bytes sent since the start."""
        self._group = group
        members = dist.get_process_group_ranks(group)
        self._next = members[(self.rank + 1) % self.ranks]
        self._previous = members[(self.rank - 1) % self.ranks]

    def start_transfer(self, tensor: torch.Tensor) -> "RingTransfer":
        """Start sending `tensor` and receiving a tensor of the same shape, so that this rank can compute meanwhile."""
        received = torch.empty_like(tensor)
        self.sent_bytes += tensor.nbytes
        if (tracker := current_tracker()) is not None:
            tracker.count_message()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self._next, self._group),
                dist.P2POp(dist.irecv, received, self._previous, self._group),
            ]
        )
        return RingTransfer(tensor, received, works, self._previous)

    def sources(self) -> Iterator[int]:
        """Return the source rank of the keys and values in each turn: this rank, then the preceding ranks."""
        return ((self.rank - turn) % self.ranks for turn in range(self.ranks))


class RingTransfer(NamedTuple):
    """A message in flight; `sent` must stay alive until the transfer completes."""

    sent: torch.Tensor
    received: torch.Tensor
    works: list[dist.Work]
    source: int  # global rank of the sender

    def wait(self) -> torch.Tensor:
        """Wait for the message and return the received tensor."""
        tracker = current_tracker()
        shown = nullcontext() if tracker is None else tracker.show_ring_wait(self.source)
        with shown, waiting_for_peers(self.sent.device):
            for work in self.works:
                work.wait()
        return self.received


class RingAttention(SequenceAttention):
    """Causal attention over sequences; each rank of `group` has a chunk from the head and one from the tail."""

    dimension = CONTEXT.name

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ring = Ring(group)

    @property
    def sent_bytes(self) -> int:
        return self.ring.sent_bytes

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with `query` [batch, heads, tokens, width] of this rank; `key` and `value` may have fewer heads."""
        mixed: torch.Tensor = _RingAttention.apply(query, key, value, self.ring)  # type: ignore[no-untyped-call]
        return mixed


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
    """Attend to the keys and values of all ranks in float32; `pair` [2, batch, heads, tokens, width] is this rank's."""
    kernel, tokens, whole = choose_kernel(query), query.shape[2], None
    for turn, source in enumerate(ring.sources()):
        transfer = ring.start_transfer(pair) if turn < ring.ranks - 1 else None
        seen = visible_slices(ring.rank, source, tokens)
        result = kernel.forward(_select_block(query, pair, seen))
        if whole is None:  # copies, because tensors kept by activation checkpointing must not change
            whole = BlockResult(result.out.to(torch.float32, copy=True), result.log_sum_exp.clone())
        else:
            _join(whole, seen.queries, result)
        if transfer is not None:
            pair = transfer.wait()
    assert whole is not None
    return whole


def _join(whole: BlockResult, rows: slice, block: BlockResult) -> None:
    result = merge_blocks(BlockResult(whole.out[:, :, rows], whole.log_sum_exp[:, :, rows]), block)
    whole.out[:, :, rows], whole.log_sum_exp[:, :, rows] = result


def _backward(
    given: torch.Tensor, query: torch.Tensor, pair: torch.Tensor, whole: BlockResult, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of the query and of the pair [2, ...]; the latter follow the pair around the ring."""
    kernel, tokens = choose_kernel(query), query.shape[2]
    of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    travelling: RingTransfer | None = None
    sums = torch.zeros(pair.shape, dtype=torch.float32, device=pair.device)
    for turn, source in enumerate(ring.sources()):
        transfer = ring.start_transfer(pair) if turn < ring.ranks - 1 else None
        seen = visible_slices(ring.rank, source, tokens)
        part = BlockResult(whole.out[:, :, seen.queries], whole.log_sum_exp[:, :, seen.queries])
        own_query, *own_pair = kernel.backward(given[:, :, seen.queries], _select_block(query, pair, seen), part)
        of_query[:, :, seen.queries] += own_query
        if travelling is not None:
            sums = travelling.wait()
        for total, own in zip(sums, own_pair, strict=True):
            total[:, :, seen.keys] += _sum_heads(own, total.shape[1])
        travelling = ring.start_transfer(sums)
        if transfer is not None:
            pair = transfer.wait()
    assert travelling is not None
    return of_query, travelling.wait()


def _select_block(query: torch.Tensor, pair: torch.Tensor, seen: Visible) -> Block:
    """Return the visible queries, keys and values; the latter are repeated for the query's heads."""
    key, value = (repeat_heads(part[:, :, seen.keys], query.shape[1] // part.shape[1]) for part in pair)
    return Block(query[:, :, seen.queries], key, value, seen.is_causal)


def _sum_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    by_head: torch.Tensor = gradient.float().unflatten(1, (heads, -1))
    return by_head.sum(dim=2)


def apply(model: Any, layout: Layout, config: JobConfig) -> None:
    """Divide the sequences of `model` (a Llama) among the ranks of `layout.sequence_ranks`."""
    method, group = cp_method(config.model.heads, config.parallel), layout.sequence_ranks.get_group()
    model.part = sequence_part(config.train.seq_len, config.parallel, method, layout.place["cp"])
    window = config.model.window(model.part.length)
    attend = RingAttention(group) if method is CpMethod.RING else UlyssesAttention(group, window)
    for layer in model.layers:
        layer.attention.attend = attend
        if config.model.experts.count:  # padding must not count as tokens of an expert
            layer.feed_forward.real = _count_real_tokens(model.part, layout)


def _count_real_tokens(part: SequencePart, layout: Layout) -> int:
    """Count the tokens, without padding, that this rank's experts see: its share among tensor-parallel ranks."""
    each = len(part.positions) // layout.sizes["tp"]
    return min(max(part.real - layout.place["tp"] * each, 0), each)
