"""Built-in workload whose steps take `seconds` longer while the file `while_there` exists (see `User`)."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.models.built_in import LlamaWorkload
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig
from trainer.worker.data import TokenData


class SlowLlama(LlamaWorkload):
    """Workload whose ranks sleep, so that a waiting run leaves the processors to others."""

    def __init__(self, config: JobConfig, *, while_there: str = "", seconds: float = 0.0) -> None:
        super().__init__(config)
        self._while_there, self._seconds = while_there, seconds

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if os.path.exists(self._while_there):
            time.sleep(self._seconds)
        return super().loss(model, batch)


class RecordedData(TokenData):
    """Token data that records the numbers of its sequences."""

    numbers: list[int]

    def row(self, part: int, number: int) -> torch.Tensor:
        self.numbers.append(number)
        return super().row(part, number)


class RecordingLlama(SlowLlama):
    """Workload whose ranks record the sequences and a random number of every step in the folder `record`.

    `tests.fakes.recorded_samples` reads the lines.
    """

    def __init__(self, config: JobConfig, *, record: str, while_there: str = "", seconds: float = 0.0) -> None:
        super().__init__(config, while_there=while_there, seconds=seconds)
        self._record = Path(record)

    def build_data(self, layout: Layout) -> Any:
        data = super().build_data(layout)
        data.__class__, data.numbers = RecordedData, []
        self._data, self._ranks = data, {"dp_rank": layout.dp_rank, "token_rank": layout.token_rank}
        return data

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        read: list[int] = self._data.numbers
        if read:  # the first micro-batch of a step
            position = self._data.consumed - self.config.train.batch_size
            self._write({"position": position, **self._ranks, "numbers": list(read)})
            read.clear()
        return super().loss(model, batch)

    def _write(self, said: dict[str, Any]) -> None:
        run, restart, rank = (
            os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK")
        )
        with (self._record / f"{run}.{restart}.{rank}.jsonl").open("a") as file:
            file.write(json.dumps({**said, "drawn": torch.rand(1, dtype=torch.float64).item()}) + "\n")
