"""Forked pipeline ranks that report the bytes of their states and the peak of each step."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from tests.trainer.worker.forked_ranks import report
from tests.trainer.worker.memory.allocated_bytes import peaks
from trainer.models.pipelined_llama import PipelinedLlama, pipelined_llama
from trainer.parallel.apply import mesh
from trainer.parallel.apply.data_parallel import GradientSync
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.optimizer import adamw
from trainer.worker.reporting.metrics import held_states
from trainer.worker.train_loop import reduction
from trainer.worker.train_loop.reduction import RankZeroMessage

STEPS = 3


def job(sections: dict[str, Any]) -> JobConfig:
    made = build(JobConfig, sections)
    assert isinstance(made, JobConfig)
    return made


def measured(sections: dict[str, Any]) -> dict[str, Any]:
    """Train like a run from the first tensor on; return `held`, as rank 0 reports it, and `peak`."""
    config = job(sections)
    with tempfile.TemporaryDirectory() as folder, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as it:
        layout = mesh.build(config.parallel, torch.device("cpu"), dist.get_rank(), dist.get_world_size())
        model = pipelined_llama(config, layout)
        optimizer = adamw(model, config.optimizer)
        sync = GradientSync(model, layout, config.parallel.reduce)
        for number in range(STEPS):
            with record_function(f"step {number + 1}"):
                _train(config, model, optimizer, sync, batches(config, layout, number))
        it.stop()
        trace = Path(folder) / "trace.json"
        it.export_chrome_trace(str(trace))
        found = peaks(trace)
    return {"held": held_states(model, optimizer, config.parallel), "peak": min(found[1:])}


def batches(config: JobConfig, layout: mesh.Layout, step: int) -> list[torch.Tensor]:
    share = config.train.batch_size // layout.dp_size
    generator = torch.Generator().manual_seed(100 * step + layout.dp_rank)
    shape = (share, config.train.seq_len + 1)
    return list(torch.randint(config.model.vocab_size, shape, generator=generator).split(_size(config, layout)))


def _size(config: JobConfig, layout: mesh.Layout) -> int:
    return config.train.batch_size // layout.dp_size // config.parallel.pipeline.micro_batches


def _train(
    config: JobConfig, model: PipelinedLlama, optimizer: torch.optim.Optimizer, sync: GradientSync,
    data: list[torch.Tensor],
) -> None:  # fmt: skip
    sync.begin_step()
    loss = model.pipeline.step(data)
    sync.reduce_now()
    gradients = sync.end_step()
    reduced = reduction.reduce(0, gradients, loss, StopReason.NONE, RankZeroMessage(), about=sync.facts())
    reduction.clip(gradients, reduced.norm, config.optimizer.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    report(measured, times=1)
