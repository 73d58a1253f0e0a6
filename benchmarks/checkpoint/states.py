"""The state sets: BIG, 64 tensors of 4 MiB; SMALL, 4000 tensors of 64 KiB (parameters and two moments)."""

from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor

_WORDS = {"BIG": (64, 1 << 20), "SMALL": (4000, 1 << 14)}
_KINDS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")


@dataclass
class State:
    """Tensors that change a little before every save, as those of a training do."""

    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        self._steps = count(1)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def next_step(self) -> int:
        """One step further: a value of every tensor changes, and so does its digest."""
        with torch.no_grad():
            torch._foreach_add_([tensor[:1] for tensor in self.tensors.values()], 0.001)
        return next(self._steps)

    def blank(self) -> dict[str, Tensor]:
        return {key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()}


def state(set_name: str, scale: float = 1.0) -> State:
    """The set of this name; `scale` is the share of its tensors that is made."""
    number, words = _WORDS[set_name]
    draw = torch.Generator().manual_seed(number)
    names = (kind.format(f"layers.{index:05d}.weight") for index in count() for kind in _KINDS)
    tensors = {key: torch.randn(words, generator=draw) for key in islice(names, max(3, int(number * scale)))}
    return State(tensors)
