"""Attention of some queries to some of their keys, with what is needed to join it with attention to the others.

The log-sum-exp of a query's scores says how much a block weighs beside others (Milakov and Gimelshein 2018; Dao et al.
2022). The backward pass of a block takes the log-sum-exp and the output over all keys, and gives this block's part.

Queries are [batch, heads, queries, width], keys and values [batch, heads, keys, width] with as many heads.
"""

from typing import NamedTuple, Protocol

import torch

_aten = torch.ops.aten
_FLASH_WIDTH = 8
"""Of which the width of a head is a multiple where CUDA's flash attention is called directly."""


class BlockResult(NamedTuple):
    """Of one block, or of several: [batch, heads, queries, width], and [batch, heads, queries] in float32."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor


class Gradients(NamedTuple):
    """In the shapes of what they belong to."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Kernel(Protocol):
    """Computes a block; `is_causal`: query n sees keys up to n, else all keys."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> BlockResult:
        """Attention to this block."""

    def backward(
        self, given: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, whole: BlockResult,
        *, is_causal: bool,
    ) -> Gradients:  # fmt: skip
        """What this block adds to the gradients, where the output over all keys (`whole`) has the gradient `given`."""


def kernel_for(query: torch.Tensor) -> Kernel:
    """One that keeps no scores in memory, where there is one for this device, precision and width."""
    if query.is_cpu:
        return CpuFlash()
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return CudaFlash() if is_half and query.shape[-1] % _FLASH_WIDTH == 0 else Plain()


class CpuFlash:
    """torch's flash attention on CPUs."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> BlockResult:
        return BlockResult(*_aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal))

    def backward(
        self, given: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, whole: BlockResult,
        *, is_causal: bool,
    ) -> Gradients:  # fmt: skip
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                given, query, key, value, whole.out, whole.log_sum_exp, 0.0, is_causal
            )
        )


class CudaFlash:
    """torch's flash attention on GPUs; not exercised on a GPU yet."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> BlockResult:
        out, log_sum_exp, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
        return BlockResult(out, log_sum_exp)

    def backward(
        self, given: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, whole: BlockResult,
        *, is_causal: bool,
    ) -> Gradients:  # fmt: skip
        unused = torch.zeros(2, dtype=torch.int64, device=query.device)  # generators: there is no dropout
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                given, query, key, value, whole.out, whole.log_sum_exp.contiguous(), None, None,
                query.shape[2], key.shape[2], 0.0, is_causal, unused, unused,
            )
        )  # fmt: skip


class Plain:
    """Products and an exponential in float32; all scores of a block exist at a time."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> BlockResult:
        scores = _scores(query, key, is_causal=is_causal)
        log_sum_exp = scores.logsumexp(dim=-1)
        return BlockResult((scores - log_sum_exp[..., None]).exp().to(value.dtype) @ value, log_sum_exp)

    def backward(
        self, given: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, whole: BlockResult,
        *, is_causal: bool,
    ) -> Gradients:  # fmt: skip
        weights = (_scores(query, key, is_causal=is_causal) - whole.log_sum_exp[..., None]).exp()
        upstream = given.float()
        of_weights = upstream @ value.float().mT - (upstream * whole.out.float()).sum(dim=-1, keepdim=True)
        of_scores = weights * of_weights * query.shape[-1] ** -0.5
        return Gradients(of_scores @ key.float(), of_scores.mT @ query.float(), weights.mT @ upstream)


def joined(one: BlockResult, other: BlockResult) -> BlockResult:
    """Attention to the keys of both blocks, in float32."""
    total = torch.logaddexp(one.log_sum_exp, other.log_sum_exp)
    first, second = (part.out.float() * (part.log_sum_exp - total).exp()[..., None] for part in (one, other))
    return BlockResult(first + second, total)


def _scores(query: torch.Tensor, key: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    scores: torch.Tensor = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores
