"""Wrapping a model for its data-parallel ranks: all strategies are FSDP2, with another mesh or another resharding."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.contract.config import JobConfig
from trainer.contract.parallel_config import Offload, Reduce
from trainer.worker.fsdp_units import chosen_units
from trainer.worker.mesh import Layout


def share_out(
    units: Sequence[nn.Module], model: nn.Module, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy
) -> None:
    """Wrap these parts of `model` one by one, in the order in which they compute, and then the rest of it.

    `parallel.fsdp.wrap` may choose other parts; raises NoSuchModule when it names none.

    Replicas without shards (DDP) are a mesh whose inner dimension has one rank: FSDP2 then averages gradients in the
    same buckets in every step, so that a restart is bit-equal. DDP's own buckets are rebuilt after the first step.
    """
    # Pinned memory is what a GPU copies from while it computes.
    pins = layout.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if offloads_all(config) else OffloadPolicy()
    units = chosen_units(model, config.parallel.fsdp.wrap, units)
    for module in (*units, model):
        fully_shard(
            module, mesh=layout.fsdp, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=config.parallel.reshard_after_forward,
        )  # fmt: skip
    if depth := config.parallel.fsdp.prefetch:
        _prefetch([unit for unit in units if isinstance(unit, FSDPModule)], depth)


def offloads_all(config: JobConfig) -> bool:
    """Whether shards of parameters are kept in host memory, and with them gradients and optimizer state."""
    return config.parallel.fsdp.offload == Offload.ALL


def offloads_optimizer(config: JobConfig) -> bool:
    """Whether the optimizer's state alone is kept in host memory."""
    return config.parallel.fsdp.offload == Offload.OPTIMIZER


def choose_reduction(model: nn.Module, when: Reduce, *, is_last: bool) -> None:
    """What the next backward pass does with its gradients; `is_last`: it is that of the step's last micro-batch.

    With `each` nothing has to be chosen: that is what FSDP2 does by itself.
    """
    if not isinstance(model, FSDPModule):
        return
    if when is Reduce.LAST:
        model.set_requires_gradient_sync(is_last)
    elif when is Reduce.SCATTER:
        model.set_requires_all_reduce(is_last)


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - depth) : number])))
