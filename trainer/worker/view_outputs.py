"""Units of FSDP that return views: an operation in place on one would drop the hook that gathers its weights again."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def copy_views(unit: nn.Module) -> None:
    """Have `unit` return copies where it returns views (after `flatten`, `squeeze`, a Linear over three dimensions).

    Call it before `fully_shard`. Without it torch warns in every rank's log, and `nn.ReLU(inplace=True)` behind such a
    unit makes the backward pass fail.
    """
    unit.register_forward_hook(_copied)


def _copied(_unit: nn.Module, _inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return tree_map_only(torch.Tensor, _without_base, output)


def _without_base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor
