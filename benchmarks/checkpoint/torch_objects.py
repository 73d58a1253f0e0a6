"""torch's object collectives without NumPy, so that its own checkpoints can be measured where there is none."""

import pickle
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor


def without_numpy() -> None:
    """Replace the two conversions that need NumPy; what they cost is the same to within microseconds."""
    c10d._object_to_tensor = _packed
    c10d._tensor_to_object = _unpacked


def _packed(value: Any, device: torch.device, _group: Any) -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    return data, torch.tensor([data.numel()], device=device)


def _unpacked(data: Tensor, size: Tensor | int, _group: Any) -> Any:
    room = bytearray(int(size))
    torch.frombuffer(room, dtype=torch.uint8).copy_(data[: int(size)].cpu())
    return pickle.loads(room)
