"""The built-in model with experts, of which one rank never begins an exchange of tokens in its second layer."""

import time
from typing import Any

from torch import nn

from trainer.models.built_in import LlamaWorkload


class StuckInExperts(LlamaWorkload):
    def parallelize(self, model: nn.Module, layout: Any) -> Any:
        self.rank, self.calls = layout.rank, 0
        made = super().parallelize(model, layout)
        made.layers[1].feed_forward.router.register_forward_hook(self._wait)
        return made

    def _wait(self, *_: object) -> None:
        self.calls += 1
        if self.rank == 2 and self.calls == 9:
            time.sleep(3600)
