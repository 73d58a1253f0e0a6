"""One rank of a bare training loop with orch's model and data, without monitoring.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=...
        python -m benchmarks.bare_loop RUN_FOLDER FOLDER STRATEGY

If STRATEGY is one of torch's own (a key of `WRAPPED`, or `pp`), the loop has the usual parts: micro-batches, torch's
gradient clipping, a learning-rate schedule, AdamW, and the step's mean loss over all ranks, read one step later. With
`same`, it has the product's parallelism, reductions and deterministic kernels. The loop has no agent, cell, stopwatch,
metrics, saver or agreement. Each step writes a line to FOLDER/rank-N.jsonl, {time, step, pid}.
"""

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_script import write_step
from trainer.costs.micro_batches import micro_batch_count, micro_batch_size
from trainer.costs.stage_split import split_model
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import LlamaStage
from trainer.parallel.apply import mesh as meshes
from trainer.parallel.apply.tensor_parallel import split_matrices
from trainer.protocol.config import JobConfig, load
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.run_dir import RunDir
from trainer.worker import workload
from trainer.worker.data import TokenData
from trainer.worker.optimizer import adamw, learning_rate, set_learning_rate
from trainer.worker.startup import rendezvous
from trainer.worker.train_loop import reduction

_CPU = torch.device("cpu")


def _fully_shard(model: Llama, mesh: DeviceMesh, reshard: bool | None = None) -> nn.Module:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def _ddp(model: Llama, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def _tp(model: Llama, mesh: DeviceMesh) -> nn.Module:
    split_matrices(model, mesh)
    return model


WRAPPED: dict[str, Callable[[Llama, DeviceMesh], nn.Module]] = {
    "ddp": _ddp,
    "zero2": lambda model, mesh: _fully_shard(model, mesh, reshard=False),
    "fsdp": _fully_shard,
    "tp": _tp,
}


class BareWholePasses:
    """Passes on ranks that have all layers, or a part of each layer."""

    def __init__(self, config: JobConfig, mesh: DeviceMesh, strategy: str) -> None:
        bare = workload.build(config).build_model()
        assert isinstance(bare, Llama)
        if strategy == "ddp":  # DDP broadcasts values when it wraps a model
            bare.materialize(_CPU, config.train.seed)
        self.model = WRAPPED[strategy](bare, mesh)
        if strategy != "ddp":
            bare.materialize(_CPU, config.train.seed)

    def gradients(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients, and return this rank's mean loss for the step."""
        total = torch.zeros(())
        for batch in batches:
            loss = self.model(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    def end_step(self, total: torch.Tensor, max_norm: float) -> torch.Tensor:
        """Clip by the norm of all gradients, and return the mean loss over all ranks."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        dist.all_reduce(total)
        return total / dist.get_world_size()


class BareStagedPasses:
    """Passes through torch's own pipeline, with one stage of orch's layers on each rank and shapes known in advance."""

    def __init__(self, config: JobConfig, mesh: DeviceMesh) -> None:
        part = split_model(config.parallel.pipeline, config.model, config.train).parts[mesh.get_rank()]
        with torch.device("meta"):
            self.model = LlamaStage(config.model, config.train, part)
        self.model.materialize(_CPU, config.train.seed)
        self._part, self._count = part, micro_batch_count(config.parallel.pipeline, config.train, 1)
        shape = (micro_batch_size(config.parallel.pipeline, config.train, 1), config.train.seq_len)
        with torch.device("meta"):
            activation = torch.empty(*shape, config.model.dim, requires_grad=True)
            first, last = torch.empty(shape, dtype=torch.long), torch.empty((), requires_grad=True)
        stage = PipelineStage(
            self.model, part.stage, part.stages, _CPU, group=mesh.get_group(),
            input_args=(first if part.is_first else activation,),
            output_args=(last if part.is_last else activation,),
        )  # fmt: skip
        self._schedule = Schedule1F1B(stage, self._count, loss_fn=lambda loss, _: loss)

    def gradients(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients, and return the step's mean loss, which is zero except on the last rank."""
        tokens = torch.cat(list(batches))
        losses: list[torch.Tensor] = []
        args = (tokens[:, :-1],) if self._part.is_first else ()
        if self._part.is_last:
            self._schedule.step(*args, target=tokens[:, 1:], targets=tokens[:, 1:], losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)
        return torch.stack(losses).sum().detach() / self._count if losses else torch.zeros(())

    def end_step(self, total: torch.Tensor, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all stages, and return the step's loss; a single reduction sums both."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        sums = torch.stack([nn.utils.get_total_norm(gradients).square(), total])
        dist.all_reduce(sums)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, sums[0].sqrt())
        return sums[1]


def train_with_torch(config: JobConfig, lines: TextIO, strategy: str) -> None:
    torch.set_num_threads(rendezvous.threads_per_rank(config.cluster))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    passes = BareStagedPasses(config, mesh) if strategy == "pp" else BareWholePasses(config, mesh, strategy)
    optimizer = adamw(passes.model, config.optimizer)
    alike = strategy in ("tp", "pp")
    data = TokenData(
        Path(config.data.path), config.train, shuffle=config.data.shuffle, device=_CPU,
        dp_rank=0 if alike else dist.get_rank(), dp_size=1 if alike else dist.get_world_size(),
    )  # fmt: skip
    previous = torch.zeros(())
    for step in range(1, sys.maxsize):
        total = passes.gradients(data.take())
        loss = passes.end_step(total, config.optimizer.clip_norm)
        set_learning_rate(optimizer, learning_rate(config.optimizer, config.train.steps, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        previous.item()
        previous = loss
        write_step(lines, step)


def train_with_same_parts(config: JobConfig, lines: TextIO) -> None:
    rendezvous.be_deterministic(rendezvous.threads_per_rank(config.cluster))
    torch.manual_seed(config.train.seed)
    random.seed(config.train.seed)
    dist.init_process_group("gloo")
    job = workload.build(config)
    layout = meshes.build(config.parallel, _CPU, dist.get_rank(), dist.get_world_size())
    model = job.parallelize(job.build_model(), layout)
    optimizer, data = job.build_optimizer(model), job.build_data(layout)
    for step in range(1, sys.maxsize):
        batches = data.take()
        total = torch.zeros(())
        for batch in batches:
            loss = job.loss(model, batch) / len(batches)
            loss.backward()
            total += loss.detach()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        reduced = reduction.reduce(step, gradients, total, StopReason.NONE, reduction.RankZeroMessage())
        reduction.clip(gradients, reduced.norm, config.optimizer.clip_norm)
        set_learning_rate(optimizer, learning_rate(config.optimizer, config.train.steps, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        write_step(lines, step)


if __name__ == "__main__":
    config, folder, strategy = load(RunDir(Path(sys.argv[1])), attempt=0), Path(sys.argv[2]), sys.argv[3]
    with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a") as lines:
        try:
            if strategy == "same":
                train_with_same_parts(config, lines)
            train_with_torch(config, lines, strategy)
        except RuntimeError:  # the peer was terminated
            os._exit(1)
