"""Sharding the built-in model: sequences among ranks, tensor parallelism inside a layer, FSDP2 around every layer."""

from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.models.mixture_of_experts import MixtureOfExperts
from trainer.parallel.apply.context_parallel import context_parallel
from trainer.parallel.apply.data_parallel import apply_data_parallel
from trainer.parallel.apply.expert_parallel import expert_parallel, share_tokens
from trainer.parallel.apply.fsdp_units import CannotShard
from trainer.parallel.apply.layer_wrappers import compile_forward
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.layout_problems import refusal
from trainer.protocol.config import JobConfig
from trainer.worker.workload import WorkloadError, mixed_precision


def check(config: JobConfig) -> None:
    """Raise WorkloadError for sizes that the ranks cannot share, like submit."""
    if refused := refusal(config):
        raise WorkloadError(str(refused))


def shard(model: Any, layout: Layout, config: JobConfig) -> None:
    """Shard `model` (a Llama on the meta device) over the mesh in place."""
    if layout.tp.size() > 1:
        tensor_parallel(model, layout.tp)
        model.tie()
        if config.model.experts.count:
            share_tokens(model, layout)
    if layout.sizes.cp > 1:
        context_parallel(model, layout, config)
    if config.train.compile:
        for layer in model.layers:
            compile_forward(layer)
    # Inputs arrive in the right precision; casting them would round the rotary table.
    policy = replace(mixed_precision(config), cast_forward_inputs=False)
    if layout.expert_mesh is not None:
        expert_parallel(model, layout, config, policy)
    try:
        apply_data_parallel(model.layers, model, layout, config, policy)
    except CannotShard as error:
        raise WorkloadError(str(error)) from error


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Split activations along the sequence between layers, and along heads and inner width inside them."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            # Each rank keeps the logits of its part of the vocabulary.
            "output": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        has_experts = isinstance(layer.feed_forward, MixtureOfExperts)
        parallelize_module(layer, mesh, _attention_plan() | (_mixture_plan() if has_experts else _feed_forward_plan()))


def _attention_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
    }


def _mixture_plan() -> dict[str, ParallelStyle]:
    """Return a plan in which each rank keeps its part of the sequence, as between layers, for the experts."""
    own = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
    return {"feed_forward": own}


def _feed_forward_plan() -> dict[str, ParallelStyle]:
    return {
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
