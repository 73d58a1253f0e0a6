"""Wrapping a model for its data-parallel ranks: all strategies are FSDP2, with another mesh or another resharding."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.contract.config import JobConfig
from trainer.contract.parallel_config import Offload
from trainer.worker.fsdp_units import chosen_units, refuse_parameters
from trainer.worker.mesh import Layout


def share_out(
    units: Sequence[nn.Module], model: nn.Module, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy
) -> None:
    """Wrap these parts of `model` one by one, in the order in which they compute, and then the rest of it.

    `parallel.fsdp.wrap` may choose other parts; raises CannotShard for what cannot be done with this model.

    Replicas without shards (DDP) are a mesh whose inner dimension has one rank: FSDP2 then averages gradients in the
    same buckets in every step, so that a restart is bit-equal. DDP's own buckets are rebuilt after the first step.
    """
    # Pinned memory is what a GPU copies from while it computes.
    pins = layout.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if offloads_all(config) else OffloadPolicy()
    units = chosen_units(model, config.parallel.fsdp.wrap, units)
    refuse_parameters(units, model)
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


def reduce_gradients_of_next(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass ends with gradients that are reduced, or adds whole ones up on this rank.

    Call between a forward pass and its backward pass; collective where a unit was never gathered.
    """
    if not isinstance(model, FSDPModule):
        return
    if not now:
        _gather_the_unused(model)
    model.set_requires_gradient_sync(now)


def _gather_the_unused(model: FSDPModule) -> None:
    """Gather units once that no forward pass has used yet: torch 2.13 fails where it looks for their gradients."""
    for unit in _units_of(model):
        groups = unit._get_fsdp_state()._fsdp_param_groups
        if any(not hasattr(parameter, "_unsharded_param") for group in groups for parameter in group.fsdp_params):
            unit.unshard()
            unit.reshard()


def _units_of(model: FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - depth) : number])))
