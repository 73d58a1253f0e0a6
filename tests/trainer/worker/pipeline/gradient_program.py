"""Ranks of one or several pipelines over gloo: FOLDER WORLD RANK DP SHARDED SCHEDULE..., each schedule one step.

Prints {schedule: {...}} with what the rank's gradients are beside those of one process that has the whole model.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer.contract.config import JobConfig, ModelConfig, TrainConfig
from trainer.contract.pipeline.pipeline_config import PipelineConfig
from trainer.contract.pipeline.stage_fit import split_of
from trainer.contract.pipeline.stage_ranks import stages_of_rank
from trainer.contract.pipeline.stage_split import StagePart
from trainer.worker.llama import Llama
from trainer.worker.mesh import Layout
from trainer.worker.pipeline.build import stage, stage_module
from trainer.worker.pipeline.llama_stage import LlamaStage
from trainer.worker.pipeline.runtime import Pipeline

CPU = torch.device("cpu")
MICRO_BATCHES, SEQUENCES = 8, 2
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2}
Gradients = Mapping[str, torch.Tensor]


def config(**train: Any) -> JobConfig:
    return JobConfig(
        model=ModelConfig(dim=32, layers=8, heads=4, kv_heads=2, ffn_dim=64),
        train=TrainConfig(seed=7, seq_len=16, **{"dtype": "float32", **train}),
    )


def batches(dp_rank: int) -> list[torch.Tensor]:
    """The micro-batches of a step on one data-parallel rank."""
    generator = torch.Generator().manual_seed(dp_rank)
    return [torch.randint(0, 257, (SEQUENCES, 17), generator=generator) for _ in range(MICRO_BATCHES)]


def of_one_process(job: JobConfig, data: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    """As the training loop has it: the loss of each micro-batch over their number, one backward pass after another."""
    model = Llama(job.model, job.train)
    model.materialize(CPU, job.train.seed)
    total = torch.zeros(())
    for batch in data:
        loss = model(batch[:, :-1], batch[:, 1:]) / len(data)
        loss.backward()
        total += loss.detach()
    return total, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def whole_stage(job: JobConfig, part: StagePart) -> LlamaStage:
    with torch.device("meta"):
        module = LlamaStage(job.model, job.train, part)
    module.materialize(CPU, job.train.seed)
    return module


def pipeline_of(job: JobConfig, schedule: str, layout: Layout, *, sharded: bool) -> Pipeline:
    group = layout.mesh["pp"].get_group()
    chosen = PipelineConfig(stages=group.size() * STAGES_PER_RANK[schedule], schedule=schedule)
    parts = split_of(chosen, job).parts
    make: Callable[[StagePart], LlamaStage] = (
        (lambda part: stage_module(job, part, layout)) if sharded else (lambda part: whole_stage(job, part))
    )
    stages = [
        stage(make(parts[number]), job.train, group, CPU, sequences=SEQUENCES)
        for number in stages_of_rank(chosen, group.rank())
    ]
    return Pipeline(chosen, stages, MICRO_BATCHES)


def gradients_of(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    found = {}
    for one in pipeline.stages:
        for name, parameter in one.submod.named_parameters():
            assert parameter.grad is not None, name
            gradient = parameter.grad
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    return found


def compared(found: Gradients, expected: Gradients) -> dict[str, Any]:
    differences = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in found}
    return {
        "names": sorted(found),
        "different": sorted(name for name in found if not torch.equal(found[name], expected[name])),
        "most": max(differences.values()),
    }


def main() -> None:
    folder, world, rank, dp, sharded = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world // dp, 1, dp, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    layout = Layout(mesh=mesh, device=CPU, rank=rank, world_size=world)
    job, dp_rank = config(), mesh["dp_shard"].get_local_rank()
    shares = [of_one_process(job, batches(number)) for number in range(dp)]
    expected = {name: sum(share[1][name] for share in shares) / dp for name in shares[0][1]}
    results = {}
    for schedule in sys.argv[6:]:
        pipeline = pipeline_of(job, schedule, layout, sharded=bool(sharded))
        validated = pipeline.evaluate(batches(dp_rank))
        loss = pipeline.step(batches(dp_rank))
        results[schedule] = {
            **compared(gradients_of(pipeline), expected),
            "loss": float(loss), "validated": float(validated), "expected_loss": float(shares[dp_rank][0]),
            "has_last": pipeline.has_last,
        }  # fmt: skip
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)
