"""Dynamic loss scaling for float16, so that small gradients do not become zero and large ones do not end a run."""

from collections.abc import Mapping
from typing import Any

FIRST = 65536.0
SMALLEST = 1.0
"""Minimum scale. If gradients overflow at this scale, scaling is not the cause."""
_GROWS_AFTER = 2000
"""Consecutive steps without overflow after which the scale is doubled (the default of torch's GradScaler)."""


class LossScale:
    """Factor applied to the loss in float16, and a constant 1 otherwise. Like the norms, it is equal on all ranks."""

    def __init__(self, dtype: str) -> None:
        self.is_dynamic = dtype == "float16"
        self.scale = FIRST if self.is_dynamic else 1.0
        self._good = 0
        self.overflows = 0
        """Number of optimizer steps skipped in the run, including all its restarts."""

    def update_scale(self, norm: float) -> bool:
        """Adapt the scale to the gradient norm, and return whether the optimizer must skip this step."""
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
        """Return the facts for a checkpoint."""
        scale = {"scale": self.scale, "good_steps": self._good} if self.is_dynamic else {}
        return {**scale, "overflows": self.overflows} if scale or self.overflows else {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts from a checkpoint, whose precision may differ."""
        self.overflows = int(facts.get("overflows", 0))
        if self.is_dynamic and "scale" in facts:
            self.scale, self._good = float(facts["scale"]), int(facts["good_steps"])
