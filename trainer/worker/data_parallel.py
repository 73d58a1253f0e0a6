"""Wrapping a model for its data-parallel ranks: all strategies are FSDP2, with another mesh or another resharding."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.contract.config import JobConfig
from trainer.worker.mesh import Layout


def share_out(
    units: Sequence[nn.Module], model: nn.Module, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy
) -> None:
    """Wrap these parts of `model` one by one, in the order in which they compute, and then the rest of it.

    Replicas without shards (DDP) are a mesh whose inner dimension has one rank: FSDP2 then averages gradients in the
    same buckets in every step, so that a restart is bit-equal. DDP's own buckets are rebuilt after the first step.
    """
    # Pinned memory is what a GPU copies from while it computes.
    pins = layout.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if offloads(config) else OffloadPolicy()
    for module in (*units, model):
        fully_shard(
            module, mesh=layout.fsdp, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=config.parallel.reshard_after_forward,
        )  # fmt: skip
    if depth := config.parallel.fsdp.prefetch:
        _prefetch([unit for unit in units if isinstance(unit, FSDPModule)], depth)


def offloads(config: JobConfig) -> bool:
    """Whether shards are kept in host memory."""
    return config.parallel.fsdp.offload == "all"


def reduce_gradients_of_next(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass ends with gradients that are reduced, or adds whole ones up on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - depth) : number])))
