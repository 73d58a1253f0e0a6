"""The stages of a rank, sharded over the data-parallel ranks that have the same ones."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from trainer.contract.config import JobConfig, TrainConfig
from trainer.contract.pipeline.stage_split import StagePart
from trainer.worker import parallelize
from trainer.worker.parallel.data_parallel import offloads_all
from trainer.worker.parallel.mesh import Layout
from trainer.worker.pipeline.llama_stage import LlamaStage
from trainer.worker.pipeline.stage import Stage


def stage_module(config: JobConfig, part: StagePart, layout: Layout) -> LlamaStage:
    """Sharded over `layout.fsdp`, the ranks that have the same stage, without initial weights.

    Gathered parameters are kept from one micro-batch to the next, whatever `parallel.fsdp.reshard_after_forward` says:
    the pipeline gathers them once a step, and finds gradients in them.
    """
    # torch warns in every rank's log of what would happen if an activation were changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # And of each part of the plan for tensor parallelism that is in another stage.
    warnings.filterwarnings("ignore", message="Parallelize plan key .* could not be resolved")
    fsdp = replace(config.parallel.fsdp, reshard_after_forward="never")
    config = replace(config, parallel=replace(config.parallel, fsdp=fsdp))
    with torch.device("meta"):
        module = LlamaStage(config.model, config.train, part)
    parallelize.shard(module, layout, config)
    module.allocate(layout.device, offload=offloads_all(config))
    return module


def stage(
    module: LlamaStage, train: TrainConfig, group: dist.ProcessGroup, device: torch.device, *,
    sequences: int, tp: int = 1,
) -> Stage:  # fmt: skip
    """`module` in the pipeline of the ranks of `group`; `sequences`: those of one micro-batch.

    `tp` ranks have a part of every sequence each between layers, and so between stages.
    """
    part, own = module.stage, module.part
    length = (train.seq_len if own is None else own.chunk * len(own.chunks)) // tp
    tokens, activation, loss = _examples(train, (sequences, length, module.config.dim))
    return Stage(
        module,
        part.stage,
        part.stages,
        inputs=tokens if part.is_first else activation,
        output=loss if part.is_last else activation,
        group=group,
        device=device,
    )


def _examples(train: TrainConfig, shape: tuple[int, int, int]) -> Sequence[torch.Tensor]:
    """Tokens, activations of this `shape` and the loss of one micro-batch, as shapes and types alone."""
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[train.dtype]
    return (
        torch.empty(shape[0], train.seq_len, dtype=torch.long, device="meta"),
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True),
        torch.empty((), dtype=torch.float32, device="meta", requires_grad=True),
    )
