"""Dynamic loss scaling: what keeps small gradients in float16 from becoming zero, and large ones from ending a run."""

from collections.abc import Mapping
from typing import Any

FIRST = 65536.0
SMALLEST = 1.0
"""Gradients that overflow without being scaled up are no fault of the scale."""
_GROWS_AFTER = 2000
"""Steps in a row without overflow after which the scale is doubled (as torch's GradScaler does by default)."""


class LossScale:
    """The factor of the loss in float16; one, for ever, in other precisions. All ranks see the same norms."""

    def __init__(self, dtype: str) -> None:
        self.is_dynamic = dtype == "float16"
        self.scale = FIRST if self.is_dynamic else 1.0
        self._good = 0
        self.overflows = 0
        """Steps of the run, over all its restarts, that the optimizer was not asked to make."""

    def overflowed(self, norm: float) -> bool:
        """Whether the optimizer must leave this step out; adapts the scale to the norm of its gradients."""
        if not self.is_dynamic:
            return False
        if norm - norm != 0 and self.scale > SMALLEST:  # NaN or infinity
            self.scale, self._good = self.scale / 2, 0
            self.overflows += 1
            return True
        self._good += 1
        if self._good == _GROWS_AFTER:
            self.scale, self._good = self.scale * 2, 0
        return False

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        scale = {"scale": self.scale, "good_steps": self._good} if self.is_dynamic else {}
        return {**scale, "overflows": self.overflows} if scale or self.overflows else {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on with the scale of a checkpoint; one made in another precision has none, an older orch's no count."""
        self.overflows = int(facts.get("overflows", 0))
        if self.is_dynamic and "scale" in facts:
            self.scale, self._good = float(facts["scale"]), int(facts["good_steps"])
