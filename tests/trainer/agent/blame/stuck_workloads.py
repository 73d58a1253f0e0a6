"""The built-in model, in which one rank never begins an exchange in the second layer.
STUCK in the environment is that rank and the number of the call.
"""

import os
import time
from typing import Any

from torch import nn

from trainer.models.built_in import LlamaWorkload


class _Stuck(LlamaWorkload):
    def parallelize(self, model: nn.Module, layout: Any) -> Any:
        self.rank, self.calls = layout.rank, 0
        return super().parallelize(model, layout)

    def _wait(self, *_: object) -> None:
        self.calls += 1
        if [self.rank, self.calls] == [int(number) for number in os.environ["STUCK"].split()]:
            time.sleep(3600)


class StuckInRing(_Stuck):
    def build_model(self) -> Any:
        model = super().build_model()
        model.layers[1].attention.register_forward_pre_hook(self._wait)
        return model


class StuckInExperts(_Stuck):
    def parallelize(self, model: nn.Module, layout: Any) -> Any:
        made = super().parallelize(model, layout)
        made.layers[1].feed_forward.router.register_forward_hook(self._wait)
        return made
