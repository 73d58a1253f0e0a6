"""Forked ranks that share sequences: their attention compared with that of one rank."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.trainer.worker.forked_ranks import report
from trainer.parallel.apply.context_parallel import RingAttention, UlyssesAttention, sequence_part
from trainer.parallel.apply.sequence_part import SequencePart
from trainer.parallel.context import CpMethod
from trainer.parallel.parallel_config import ParallelConfig

BATCH, WIDTH = 2, 8


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differences(case: dict[str, Any]) -> dict[str, Any]:
    ranks, rank, length, heads, kv_heads = (dist.get_world_size(), dist.get_rank(), *case["shape"])
    method, dtype = CpMethod(case["method"]), getattr(torch, case["dtype"])
    part = sequence_part(length, ParallelConfig(cp=ranks), method, rank)
    full = [whole((BATCH, count, length, WIDTH), seed, dtype) for seed, count in enumerate((heads, kv_heads, kv_heads))]
    upstream = whole((BATCH, heads, length, WIDTH), 3, dtype)
    due = attention_of_one(full, upstream)
    group = dist.group.WORLD
    assert group is not None
    attend = RingAttention(group) if method is CpMethod.RING else UlyssesAttention(group)
    own = [mine(part, tensor, padding=3.0).requires_grad_() for tensor in full]  # which must be seen in no sum
    out = attend(*own)
    out.backward(mine(part, upstream))
    found = [out.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]
    return {
        "differences": {
            name: largest(got[:, :, : part.real].float() - mine(part, want)[:, :, : part.real]) / largest(want)
            for name, got, want in zip(("out", "query", "key", "value"), found, due, strict=True)
        },
        "bits": hashlib.sha256(
            b"".join(bytes(one.contiguous().view(torch.uint8).flatten().tolist()) for one in found)
        ).hexdigest(),
    }


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def mine(part: SequencePart, tensor: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
    own = part.select_rows(tensor.transpose(1, 2)).clone()
    own[:, part.real :] = padding
    return own.transpose(1, 2).contiguous()


def attention_of_one(full: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().float().requires_grad_() for tensor in full]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(upstream.float())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def main() -> None:
    report(differences)
