"""What ranks compare of their gradients in every step: which parameters have some, and whether all have the same."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """What ranks compare of their gradients, and over how many ranks these are spread."""

    used: int = 0  # `usage_mark` of this rank
    alike: bool = False  # all ranks have the same gradients
    compared: Sequence[torch.Tensor] = ()  # those of which all ranks must have the same; all of them where `alike`
    stages: int = 1  # ranks that have different parameters of one model


def usage_mark(parameters: Iterable[torch.Tensor]) -> int:
    """Stands for which of these, whose gradients are reduced, have none or are frozen; 0 for none, at most 2**16.

    Ranks that use different ones gather, and average, one for another: nothing else notices where shapes are equal.
    """
    missing = [
        (number, parameter.requires_grad) for number, parameter in enumerate(parameters) if parameter.grad is None
    ]
    return zlib.crc32(repr(missing).encode()) % (1 << 16) + 1 if missing else 0
