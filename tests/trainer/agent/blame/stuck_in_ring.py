"""The built-in model, of which one rank never comes back from the attention of its second layer.

`STUCK` in its environment says which rank, and in which of its calls.
"""

import os
import time
from typing import Any

from torch import nn

from trainer.models.built_in import LlamaWorkload


class StuckInRing(LlamaWorkload):
    def build_model(self) -> Any:
        model = super().build_model()
        model.layers[1].attention.register_forward_pre_hook(self._wait)
        return model

    def parallelize(self, model: nn.Module, layout: Any) -> Any:
        self.rank, self.calls = layout.rank, 0
        self.stuck = tuple(map(int, os.environ.get("STUCK", "2 9").split()))
        return super().parallelize(model, layout)

    def _wait(self, *_: object) -> None:
        self.calls += 1
        if (self.rank, self.calls) == self.stuck:
            time.sleep(3600)
