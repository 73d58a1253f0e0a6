"""Pretrained parameters that are never trained and stay out of checkpoints, because every start reads them again."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

FROZEN_BASE = "frozen_base"
"""Key in a checkpoint's facts for the digest of the files that the frozen parameters come from."""


@dataclass(frozen=True, kw_only=True)
class FrozenBase:
    """Names of frozen parameters, the files that they come from, and the digest of these files."""

    names: frozenset[str]
    place: str
    digest: str


def mark_frozen_base(model: nn.Module, base: FrozenBase) -> None:
    """Leave these parameters of the whole model out of checkpoints. A resume with another digest is refused."""
    vars(model)[FROZEN_BASE] = base


def frozen_base(model: nn.Module) -> FrozenBase | None:
    found = vars(model).get(FROZEN_BASE)
    return found if isinstance(found, FrozenBase) else None


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that checkpoints contain, in the order of `named_parameters`."""
    base = frozen_base(model)
    for name, parameter in model.named_parameters():
        if base is None or name not in base.names:
            yield name, parameter
