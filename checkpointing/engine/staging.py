"""Copies of the state that a writer can read at leisure, and the plan of what this rank would write."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Staged:
    """One rank's state on the CPU: each key's local part, contiguous and with memory of its own."""

    plan: SavePlan
    local: dict[str, Tensor]


def stage(tensors: Mapping[str, Tensor]) -> Staged:
    """Copy the local part of every tensor; raises ValueError for what has no well-defined content.

    Fresh memory every time: a save that is still being written never sees the values of a later one.
    """
    with torch.no_grad():
        detached = {key: _checked(key, tensor).detach() for key, tensor in sorted(tensors.items())}
        plan = create_default_local_save_plan(detached, is_coordinator=False)
        local = {key: _copy(tensor) for key, tensor in detached.items()}
    # As DCP does for a flat state dict: tools that rebuild a nested one look the key's path up here.
    return Staged(replace(plan, planner_data={key: (key,) for key in detached}), local)


def _checked(key: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{key}: a {type(tensor).__name__} is no tensor; put it into `extra`")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{key}: a partial DTensor has no value before it is reduced")
    if tensor.layout != torch.strided:
        raise ValueError(f"{key}: layout {tensor.layout} cannot be saved, only dense tensors can")
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    copy.copy_(local)
    return copy
