"""Merged attention of blocks equals attention to all keys, for every kernel."""

import pytest
import torch
from torch.nn import functional

from trainer.parallel.apply.context_parallel import (
    Block,
    BlockResult,
    CpuFlash,
    CudaFlash,
    Kernel,
    Plain,
    choose_kernel,
    merge_blocks,
)

KEYS = 12


def drawn(count: int, keys: int = KEYS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 3, keys, 8, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kernel", [CpuFlash(), Plain()], ids=["flash", "plain"])
@pytest.mark.parametrize("at", [1, 5, 11])
def test_two_blocks_are_the_whole(kernel: Kernel, at: int) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in drawn(3))
    (given,) = drawn(1)
    due = functional.scaled_dot_product_attention(query, key, value)
    due.backward(given)
    with torch.no_grad():
        blocks = [
            Block(query, key[:, :, rows], value[:, :, rows], is_causal=False)
            for rows in (slice(0, at), slice(at, KEYS))
        ]
        whole = merge_blocks(*map(kernel.forward, blocks))
        of_query, of_key, of_value = zip(*(kernel.backward(given, block, whole) for block in blocks), strict=True)
    torch.testing.assert_close(whole.out, due.detach())
    torch.testing.assert_close(sum(of_query), query.grad)
    torch.testing.assert_close(torch.cat(of_key, dim=2), key.grad)
    torch.testing.assert_close(torch.cat(of_value, dim=2), value.grad)


@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_agree(*, is_causal: bool) -> None:
    *tensors, given = drawn(4)
    block, results = Block(*tensors, is_causal), list[BlockResult]()
    for kernel in (CpuFlash(), Plain()):
        results.append(kernel.forward(block))
        results.append(BlockResult(*kernel.backward(given, block, results[-1])[:2]))
    for one, other in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(one, other)


def test_kernels_that_keep_no_scores_are_taken_where_they_are() -> None:
    assert isinstance(choose_kernel(torch.empty(1, 1, 1, 8)), CpuFlash)
    meta = torch.empty(1, 1, 1, 8, device="meta")
    assert isinstance(choose_kernel(meta), Plain)
    assert isinstance(choose_kernel(meta.bfloat16()), CudaFlash)
    assert isinstance(choose_kernel(torch.empty(1, 1, 1, 7, device="meta", dtype=torch.bfloat16)), Plain)
