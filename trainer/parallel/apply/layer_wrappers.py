"""Layer wrappers: activation checkpointing, torch.compile, and copies of view outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.protocol.config_sections.recipe_config import TrainConfig


def copy_views(unit: nn.Module) -> None:
    """Make `unit` return copies instead of views; call before `fully_shard`.

    Otherwise torch warns in every log, and fails if `nn.ReLU(inplace=True)` follows the unit.
    """
    unit.register_forward_hook(_clone_views)


def _clone_views(_unit: nn.Module, _inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return tree_map_only(torch.Tensor, _without_base, output)


def _without_base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor


def compile_forward(module: nn.Module) -> None:
    """Compile `module.forward` without its hooks: FSDP's hooks gather and free parameters around it."""
    module.forward = torch.compile(module.forward, dynamic=False)


def is_compiled(model: nn.Module) -> bool:
    """Return whether `model`, or a part of it, has been compiled with torch.compile."""
    return any(_is_compiled(part) for part in model.modules())


def _is_compiled(part: nn.Module) -> bool:
    own = vars(part).get("forward")
    wrapped = type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
    return wrapped or hasattr(own, "_torchdynamo_orig_callable")


Recompute = Callable[..., torch.Tensor]
"""Function that calls another function on tensors and recomputes its activations in the backward pass."""

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
"""Matrix products and attention, as dispatched on CPUs and GPUs."""


def choose_recompute(number: int, train: TrainConfig) -> Recompute | None:
    """Return the recompute wrapper for layer `number`; None if the layer keeps its activations."""
    if not train.activation_checkpointing or number % train.recompute.every:
        return None
    if train.recompute.keep == "nothing":
        return partial(checkpoint, use_reentrant=False)
    return partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, list(_PRODUCTS))
    )
