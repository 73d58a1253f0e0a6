"""Stages that sleep for fixed times: FOLDER WORLD RANK SECONDS MICRO_BATCHES STEPS SCHEDULE...

Prints {schedule: [RankSeconds of this rank in each step]}. SECONDS are those of one rank's forward pass of a
micro-batch; gradients of activations and of weights take as long each.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.costs.simulation import RankSeconds
from trainer.costs.stage_split import stages_of_rank
from trainer.parallel.apply.pipeline_runtime import BubbleMeter, Pipeline
from trainer.parallel.apply.pipeline_stage import LocalStage
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.worker.reporting.work_timer import HostClock

WIDTH = 4


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """Sleeps in its forward pass and before the gradients of its input and its weight."""

    def __init__(self, seconds: float, *, is_last: bool) -> None:
        super().__init__()
        self.seconds, self.is_last = seconds, is_last
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        time.sleep(self.seconds)
        # The first stage's input has no gradient: its input's share of the backward pass is slept all the same.
        x = x.float() if x.requires_grad else x.float().requires_grad_()
        out: torch.Tensor = Sleep.apply(x, self.seconds) * Sleep.apply(self.weight, self.seconds)
        return out.mean() if self.is_last else out


def sleeping_stages(config: PipelineConfig, group: dist.ProcessGroup, seconds: float) -> list[LocalStage]:
    activation = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    tokens = torch.empty(1, WIDTH, dtype=torch.long, device="meta")
    last = config.stages - 1
    return [
        LocalStage(
            Sleeper(seconds / config.per_rank, is_last=number == last), number, config.stages,
            inputs=activation if number else tokens,
            output=torch.empty((), device="meta", requires_grad=True) if number == last else activation,
            group=group, device=torch.device("cpu"),
        )
        for number in stages_of_rank(config, group.rank())
    ]  # fmt: skip


def measured(pipeline: Pipeline, meter: BubbleMeter, micro_batches: int, steps: int) -> list[RankSeconds]:
    """Return the times of every step except the first, in which no stage sleeps."""
    sleepers = [stage.submod for stage in pipeline.stages]
    seconds = [one.seconds for one in sleepers]
    found = []
    for step in range(steps + 1):
        for one, longest in zip(sleepers, seconds, strict=True):
            one.seconds = longest if step else 0.0
        dist.barrier()
        meter.start()
        pipeline.step([torch.ones(1, WIDTH + 1, dtype=torch.long) for _ in range(micro_batches)])
        found.append(meter.take())
    return found[1:]


def main() -> None:
    folder, world, rank = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    seconds, micro_batches, steps = float(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    group = dist.group.WORLD
    assert group is not None
    results = {}
    for schedule in sys.argv[7:]:
        per_rank = PipelineConfig(stages=2 * world, schedule=schedule).per_rank
        config = PipelineConfig(stages=per_rank * world, schedule=schedule)
        meter = BubbleMeter(HostClock())
        pipeline = Pipeline(config, sleeping_stages(config, group, seconds), micro_batches, [meter])
        results[schedule] = [asdict(one) for one in measured(pipeline, meter, micro_batches, steps)]
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)
