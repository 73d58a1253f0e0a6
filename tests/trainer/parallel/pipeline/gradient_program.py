"""Ranks of one or several pipelines over gloo: FOLDER WORLD RANK DP TP KEYS SCHEDULE..., each schedule one step.

DP x TP ranks share each stage, by FSDP2 and tensor parallelism; DP 0: one rank has it, without FSDP2. KEYS as JSON:
those of `train`, `fsdp` with those of `parallel.fsdp`, and `replicas`, how many groups share each stage (HSDP). Prints
{schedule: {...}} with what the rank's gradients are beside those of the training loop without a pipeline, on the ranks
that share a stage here: with FSDP2 also of twice the loss, times the scale of float16. A pipeline of N ranks has 2 N
layers and trains 2 N micro-batches: as many stages as its schedules can have, and more micro-batches than stages are in
flight.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.costs.stage_split import StagePart, split_model, stages_of_rank
from trainer.models import parallelize
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import LlamaStage, StagesOfRank, stage, stage_module
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.apply.pipeline_runtime import Pipeline
from trainer.parallel.apply.pipeline_stage import Call
from trainer.parallel.data import FsdpConfig
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, RecomputeConfig, TrainConfig
from trainer.protocol.rank_progress.progress import StageActivity

CPU = torch.device("cpu")
SEQUENCES = 2
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2}
SCALED = ("1f1b", "zbv")
"""One schedule with whole backward passes, and one with halves."""
Gradients = Mapping[str, torch.Tensor]


def config(keys: Mapping[str, Any], layers: int, tp: int) -> JobConfig:
    train = {"dtype": "float32", **keys.get("train", {})}
    if "recompute" in train:
        train["recompute"] = RecomputeConfig(**train["recompute"])
    return JobConfig(
        model=ModelConfig(dim=32, layers=layers, heads=4, kv_heads=2, ffn_dim=64),
        train=TrainConfig(seed=7, seq_len=16, **train),
        parallel=ParallelConfig(tp=tp, fsdp=FsdpConfig(**keys.get("fsdp", {}))),
    )


def batches(dp_rank: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dp_rank)
    return [torch.randint(0, 257, (SEQUENCES, 17), generator=generator) for _ in range(number)]


def of_one_process(job: JobConfig, data: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    model = Llama(job.model, job.train)
    model.materialize(CPU, job.train.seed)
    return trained(model, data), {name: whole(parameter) for name, parameter in model.named_parameters()}


class OfDataParallel(NamedTuple):
    loss: torch.Tensor
    gradients: Gradients
    scaled: Gradients
    whole: Gradients


def of_data_parallel(job: JobConfig, layout: Layout, data: Sequence[torch.Tensor]) -> OfDataParallel:
    with torch.device("meta"):
        model = Llama(job.model, job.train)
    parallelize.shard(model, layout, job)
    model.materialize(CPU, job.train.seed)
    loss = trained(model, data)
    all_of_it = {name: whole(parameter) for name, parameter in model.named_parameters()}
    gradients = taken(model)
    trained(model, data, factor=2.0, scale=1024.0)
    return OfDataParallel(loss, gradients, taken(model), all_of_it)


def trained(model: Llama, data: Sequence[torch.Tensor], *, factor: float = 1.0, scale: float = 1.0) -> torch.Tensor:
    """Train like the loop: losses divided by their number, gradients reduced once."""
    total = torch.zeros(())
    for number, batch in enumerate(data):
        loss = model(batch[:, :-1], batch[:, 1:]) / len(data)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(data) - 1)
        (loss if scale == 1.0 else (loss * factor).float() * scale).backward()
        total += loss.detach()
    return total


def whole(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()


def taken(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    model.zero_grad(set_to_none=True)
    return found


def gradients_of(pipeline: Pipeline) -> Gradients:
    return taken(StagesOfRank([one.submod for one in pipeline.stages]))


def different(found: Gradients, expected: Gradients) -> list[str]:
    return sorted(name for name in found if not torch.equal(found[name], expected[name]))


def distance(found: Gradients, expected: Gradients) -> float:
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in found)


class Recorder:
    def __init__(self) -> None:
        self.moments: list[StageActivity] = []
        self.buffers = 0
        self.pipeline: Pipeline | None = None

    def begin_callback(self, _: StageActivity) -> Call:
        return self._look

    def _look(self) -> None:
        self.buffers = max(self.buffers, self.held())

    def end_callback(self, moment: StageActivity) -> Call:
        return lambda: self.moments.append(moment)

    def held(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.activations_held


def whole_stage(job: JobConfig, part: StagePart) -> LlamaStage:
    with torch.device("meta"):
        module = LlamaStage(job.model, job.train, part)
    module.materialize(CPU, job.train.seed)
    return module


def sharded_stage(job: JobConfig, part: StagePart, layout: Layout) -> LlamaStage:
    module = stage_module(job, part, layout)
    module.set_initial_weights(job.train.seed)
    return module


def pipeline_of(job: JobConfig, schedule: str, layout: Layout, recorder: Recorder, *, sharded: bool) -> Pipeline:
    group = layout.mesh["pp"].get_group()
    chosen = PipelineConfig(stages=group.size() * STAGES_PER_RANK[schedule], schedule=schedule)
    parts = split_model(chosen, job.model, job.train).parts
    make: Callable[[StagePart], LlamaStage] = (
        (lambda part: sharded_stage(job, part, layout)) if sharded else (lambda part: whole_stage(job, part))
    )
    stages = [
        stage(make(parts[number]), job.train, group, CPU, sequences=SEQUENCES, tp=layout.tp.size())
        for number in stages_of_rank(chosen, group.rank())
    ]
    return Pipeline(chosen, stages, 2 * group.size(), [recorder])


def no_pickles(*_: Any, **__: Any) -> None:
    raise AssertionError("a rank sends another one pickled metadata")


def step_of(pipeline: Pipeline, recorder: Recorder, data: Sequence[torch.Tensor]) -> dict[str, Any]:
    validated = pipeline.evaluate(data)
    recorder.pipeline = pipeline
    recorder.moments.clear()
    loss = pipeline.step(data)
    return {
        "loss": float(loss), "validated": float(validated), "has_last": pipeline.has_last,
        "moments": [(moment.activity, moment.stage, moment.micro_batch) for moment in recorder.moments],
        "buffers": recorder.buffers, "buffers_left": recorder.held(),
    }  # fmt: skip


def main() -> None:
    folder, world, rank, dp, tp = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    dist.send_object_list = dist.recv_object_list = no_pickles
    keys, ranks = json.loads(sys.argv[6]), max(1, dp)
    replicas = keys.get("replicas", 1)
    mesh = init_device_mesh(
        "cpu", (world // ranks // tp, replicas, ranks // replicas, tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )  # fmt: skip
    sizes = {"pp": world // ranks // tp, "dp_replicate": replicas, "dp_shard": ranks // replicas, "tp": tp}
    layout = Layout(mesh=mesh, sequence_mesh=None, sizes=sizes, device=CPU, rank=rank, world_size=world)
    dp_rank = mesh["dp_replicate"].get_local_rank() * (ranks // replicas) + mesh["dp_shard"].get_local_rank()
    twice = 2 * mesh["pp"].size()
    job, data = config(keys, layers=twice, tp=tp), batches(dp_rank, twice)
    loss, alone = of_one_process(job, [batch for replica in range(ranks) for batch in batches(replica, twice)])
    due = of_data_parallel(job, layout, data) if dp else OfDataParallel(loss, alone, alone, alone)
    away = distance(due.whole, alone)
    results = {}
    for schedule in sys.argv[7:]:
        recorder = Recorder()
        pipeline = pipeline_of(job, schedule, layout, recorder, sharded=bool(dp))
        result = step_of(pipeline, recorder, data)
        found = gradients_of(pipeline)
        results[schedule] = result | {
            "expected_loss": float(due.loss), "names": sorted(found),
            "different": different(found, due.gradients), "from_one_process": away,
        }  # fmt: skip
        if dp and schedule in SCALED:
            pipeline.step(data, factor=2.0, scale=1024.0)
            results[schedule]["scaled"] = different(gradients_of(pipeline), due.scaled)
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)
