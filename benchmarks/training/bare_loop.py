"""A rank of a bare loop with torch's own DDP, FSDP2, tensor parallelism or pipelining around orch's model and data.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=...
        python -m benchmarks.training.bare_loop RUN_FOLDER FOLDER STRATEGY

It contains the usual parts of a loop: micro-batches, clipping by torch's own function, a scheduled learning rate,
AdamW, and the mean loss of the step over all ranks, read one step later. It has no agreement, figures, checkpoints or
deterministic kernels. STRATEGY is a key of `WRAPPED`, or `pp`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.script import tell
from benchmarks.training.bare_pipeline import BareStagedPasses
from trainer.models.llama import Llama
from trainer.models.parallelize import tensor_parallel
from trainer.protocol.config import JobConfig, load
from trainer.protocol.run_dir import RunDir
from trainer.worker import workload
from trainer.worker.data import TokenData
from trainer.worker.optimizer import adamw, learning_rate, set_learning_rate
from trainer.worker.startup import rendezvous as devices

_CPU = torch.device("cpu")


def _ddp(model: Llama, mesh: DeviceMesh, seed: int) -> nn.Module:
    model.materialize(_CPU, seed)
    return DistributedDataParallel(model, process_group=mesh.get_group())


def _fsdp(model: Llama, mesh: DeviceMesh, seed: int) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.materialize(_CPU, seed)
    return model


def _grad_op(model: Llama, mesh: DeviceMesh, seed: int) -> nn.Module:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    model.materialize(_CPU, seed)
    return model


def _tp(model: Llama, mesh: DeviceMesh, seed: int) -> nn.Module:
    tensor_parallel(model, mesh)
    model.materialize(_CPU, seed)
    return model


WRAPPED: dict[str, Callable[[Llama, DeviceMesh, int], nn.Module]] = {
    "ddp": _ddp, "zero2": _grad_op, "fsdp": _fsdp, "tp": _tp,
}  # fmt: skip


class BareWholePasses:
    """Passes of ranks that have all layers, or parts of each."""

    def __init__(self, config: JobConfig, mesh: DeviceMesh, strategy: str) -> None:
        bare = workload.build(config).build_model()
        assert isinstance(bare, Llama)
        self.model = WRAPPED[strategy](bare, mesh, config.train.seed)

    def gradients(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients; return the mean loss of the step on this rank."""
        total = torch.zeros(())
        for batch in batches:
            loss = self.model(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    def end_step(self, total: torch.Tensor, most: float) -> torch.Tensor:
        """Clip by the norm of all gradients; return the mean loss of all ranks."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        assert isinstance(norm, DTensor | torch.Tensor)
        dist.all_reduce(total)
        return total / dist.get_world_size()


def main(config: JobConfig, folder: Path, strategy: str) -> None:
    torch.set_num_threads(devices.threads_per_rank(config.cluster))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    passes = BareStagedPasses(config, mesh) if strategy == "pp" else BareWholePasses(config, mesh, strategy)
    optimizer = adamw(passes.model, config.optimizer)
    data = _data(config, alike=strategy in ("tp", "pp"))
    with (folder / f"rank-{dist.get_rank()}.jsonl").open("a") as lines:
        step, told = 0, torch.zeros(())
        while True:
            step += 1
            total = passes.gradients(data.take())
            loss = passes.end_step(total, config.optimizer.clip_norm)
            set_learning_rate(optimizer, learning_rate(config.optimizer, config.train.steps, step))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            told.item()
            told = loss
            tell(lines, step)


def _data(config: JobConfig, *, alike: bool) -> TokenData:
    """Return the data, equal on all ranks or split between them."""
    return TokenData(
        Path(config.data.path), config.train, shuffle=config.data.shuffle, device=_CPU,
        dp_rank=0 if alike else dist.get_rank(), dp_size=1 if alike else dist.get_world_size(),
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(load(RunDir(Path(sys.argv[1])), attempt=0), Path(sys.argv[2]), sys.argv[3])
    except RuntimeError:  # the peer was terminated
        os._exit(1)
