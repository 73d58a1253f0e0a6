"""Tensor parallelism of the built-in model: layer plans for torch's `parallelize_module`."""

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

from trainer.parallel.apply.expert_parallel import share_tokens
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig


def apply(model: Any, layout: Layout, config: JobConfig) -> None:
    """Split the layers of `model` (a Llama on the meta device) among the ranks of `layout.tp`."""
    split_matrices(
        model, layout.tp, has_experts=config.model.experts.count > 0, has_norms=config.model.attention.qk_norm
    )
    model.tie()
    if config.model.experts.count:
        share_tokens(model, layout)


def split_matrices(model: Any, mesh: DeviceMesh, *, has_experts: bool = False, has_norms: bool = False) -> None:
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
    plan = _attention_plan(has_norms=has_norms) | (_mixture_plan() if has_experts else _feed_forward_plan())
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


_NORM_OF_HEADS = SequenceParallel(sequence_dim=2, use_local_output=True)
"""Plan for a norm over heads [batch, length, heads, width], of which each rank has some."""


def _attention_plan(*, has_norms: bool) -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        **({f"attention.{name}": _NORM_OF_HEADS for name in ("q_norm", "k_norm")} if has_norms else {}),
        "ffn_norm": SequenceParallel(),
    }


def _mixture_plan() -> dict[str, ParallelStyle]:
    """Return a plan in which each rank keeps its part of the sequence for the experts, as between layers."""
    own = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
    return {"feed_forward": own}


def _feed_forward_plan() -> dict[str, ParallelStyle]:
    return {
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
