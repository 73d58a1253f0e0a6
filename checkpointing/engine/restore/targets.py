"""What a restore fills: the same tensors for every checkpoint, or those that each one's own facts ask for."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

TensorsFor = Callable[[dict[str, Any]], Mapping[str, Tensor]]
"""From the `extra` of a checkpoint to the tensors that are to be filled from it."""


class Targets:
    """The tensors to be filled: the same for every checkpoint, or made for each that is tried."""

    def __init__(self, tensors: Mapping[str, Tensor] | TensorsFor) -> None:
        self._make: TensorsFor = tensors if callable(tensors) else lambda _: tensors
        self.last: Mapping[str, Tensor] = {}
        """Those of the checkpoint that was tried last."""

    def of(self, extra: dict[str, Any]) -> Mapping[str, Tensor]:
        """Called on all ranks with the same `extra`."""
        self.last = self._make(extra)
        return self.last
