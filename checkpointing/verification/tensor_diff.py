"""How far one tensor is apart in two checkpoints."""

import math
from dataclasses import dataclass

from checkpointing.format.index import TensorInfo


@dataclass(frozen=True, kw_only=True)
class TensorDiff:
    """One tensor in two checkpoints; a side that lacks it is None, numbers are None where nothing can be compared.

    `largest` is the largest absolute difference of a value, `relative` the norm of the difference over the larger of
    the two norms, `changed` the share of values whose bits differ. `by_fingerprint`: only fingerprints were compared.
    """

    key: str
    first: TensorInfo | None
    second: TensorInfo | None
    equal: bool = False
    by_fingerprint: bool = False
    largest: float | None = None
    relative: float | None = None
    changed: float | None = None

    @property
    def comparable(self) -> bool:
        return self.first is not None and self.first == self.second

    @property
    def weight(self) -> float:
        """By what differences are sorted: what cannot be compared, or gives no number, first."""
        if self.relative is None:
            return 0.0 if self.equal else math.inf
        return math.inf if math.isnan(self.relative) else self.relative
