"""Initial weights that are the same in every layout: each comes from its own generator, seeded by its name."""

import hashlib

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.worker.parallel.own_part import own_part


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on `seed` and `name` alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill(name: str, parameter: torch.Tensor, seed: int, deviation: float | None) -> None:
    """Set `parameter` to its share of a normal tensor cut at three deviations, or to one when `deviation` is None."""
    local = own_part(parameter)
    if deviation is None:
        local.fill_(1.0)
        return
    # The whole tensor on every rank: no communication, and one parameter at a time is small beside the model.
    full = torch.empty(parameter.shape, dtype=torch.float32)
    torch.nn.init.trunc_normal_(full, std=deviation, a=-3 * deviation, b=3 * deviation, generator=generator(seed, name))
    local.copy_(local_shard(full, parameter))


def local_shard(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `full` that this rank holds of the DTensor `like`."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start if length else 0, length)
    return full
