"""What a tensor is like without its values: for tensors of a checkpoint that a fresh process does not have yet."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

TensorMetadata = list[Any]
"""In JSON: a tensor's dtype, shape, type of device, and whether it is sharded."""


def tensor_metadata(tensor: torch.Tensor) -> TensorMetadata:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), tensor.device.type, isinstance(tensor, DTensor)]


def zeros(wanted: TensorMetadata, likes: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """A tensor of this form, sharded as the first of `likes` that has its shape; None when there is none such.

    What does not lie on the CPU is put on `device`.
    """
    dtype, shape, kind, sharded = wanted
    for like in likes:
        if like is not None and [list(like.shape), isinstance(like, DTensor)] == [shape, sharded]:
            return torch.zeros_like(like, dtype=getattr(torch, dtype), requires_grad=False)
    if sharded:
        return None
    return torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu" if kind == "cpu" else device)
