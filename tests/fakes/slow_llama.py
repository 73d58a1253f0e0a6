"""The workload of the presets, whose steps take `seconds` longer while the file `while_there` exists: see `User`."""

import os
import time
from typing import Any

import torch
from torch import nn

from trainer.contract.config import JobConfig
from trainer.worker.llama import LlamaWorkload


class SlowLlama(LlamaWorkload):
    """Its ranks sleep, so that a run to which something is to happen leaves the processors to others."""

    def __init__(self, config: JobConfig, *, while_there: str, seconds: float) -> None:
        super().__init__(config)
        self._while_there, self._seconds = while_there, seconds

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if os.path.exists(self._while_there):
            time.sleep(self._seconds)
        return super().loss(model, batch)
