"""The built-in workload under torch's profiler from its first tensor on."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.trainer.worker.memory.allocated_bytes import peaks
from trainer.models.built_in import LlamaWorkload
from trainer.models.llama import Llama
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig
from trainer.worker.data import TokenData

STEPS = 5


class ProfiledWorkload(LlamaWorkload):
    def __init__(self, config: JobConfig, folder: str) -> None:
        super().__init__(config)
        self.flops_per_step = None
        self._folder = Path(folder)

    def build_model(self) -> Llama:
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.start()
        return super().build_model()

    def build_data(self, layout: Layout) -> Any:
        return MarkedData(super().build_data(layout), self, layout.rank)

    def stop(self, rank: int) -> None:
        self.profiler.stop()
        trace = self._folder / f"trace-{rank}.json"
        self.profiler.export_chrome_trace(str(trace))
        (self._folder / f"peak-{rank}.json").write_text(json.dumps(peaks(trace)))
        trace.unlink()


class MarkedData:
    def __init__(self, data: TokenData, workload: ProfiledWorkload, rank: int) -> None:
        self._data, self._workload, self._rank = data, workload, rank
        self.fingerprint = data.fingerprint

    @property
    def consumed(self) -> int:
        return self._data.consumed

    @property
    def taken(self) -> int:
        return self._data.consumed // self._workload.config.train.batch_size

    def seek(self, consumed: int) -> None:
        self._data.seek(consumed)

    def take(self) -> list[torch.Tensor]:
        if self.taken == STEPS:
            self._workload.stop(self._rank)
        with record_function(f"step {self.taken + 1}"):
            return self._data.take()
