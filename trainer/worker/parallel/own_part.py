"""What of a tensor lies on this rank."""

import torch
from torch.distributed.tensor import DTensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, in the same memory; any other tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_own_part(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """`part`, shaped as the local part of `whole`, as a tensor that lies on the ranks as `whole` does."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
