"""Which layers compute their activations a second time in the backward pass, and what of them is kept."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.contract.config import TrainConfig

Recompute = Callable[..., torch.Tensor]
"""Calls a function with tensors; its activations are computed again when its gradient is asked for."""

_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Products and attention, by the operations that they become on CPUs and GPUs."""


def for_layer(number: int, train: TrainConfig) -> Recompute | None:
    """How layer `number` is computed; None: it keeps its activations."""
    if not train.activation_checkpointing or number % train.recompute.every:
        return None
    if train.recompute.keep == "nothing":
        return partial(checkpoint, use_reentrant=False)
    return partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, list(_PRODUCTS))
    )
