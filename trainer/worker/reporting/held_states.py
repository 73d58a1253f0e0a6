"""Bytes of the model's states that this rank holds, counted from the tensors themselves."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.contract.config_sections.parallel_config import ParallelConfig


def held_states(model: nn.Module, optimizer: torch.optim.Optimizer, parallel: ParallelConfig) -> dict[str, Any]:
    """Bytes of parameters, gradients (as they are when the optimizer steps) and optimizer state; call after a step.

    `on_host`: which of them `parallel.fsdp.offload` keeps in host memory.
    """
    weights = list(model.parameters())
    state = (value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor))
    return {
        "parameters": _bytes(weights),
        "gradients": _bytes(weight for weight in weights if weight.requires_grad),
        "optimizer": _bytes(state),
        "on_host": list(parallel.fsdp.on_host),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
