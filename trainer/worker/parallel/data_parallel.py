"""Wrapping a model for its data-parallel ranks: FSDP2 with another mesh or another resharding, or plain replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.contract.config import JobConfig
from trainer.contract.config_sections.parallel_config import Offload, Reduce
from trainer.worker.parallel.equal_replicas import require_equal
from trainer.worker.parallel.fsdp_units import chosen_units
from trainer.worker.parallel.gradient_buckets import CannotAverage, GradientBuckets, mark_replica, replicated_parameters
from trainer.worker.parallel.gradient_facts import GradientFacts, usage_mark
from trainer.worker.parallel.mesh import Layout
from trainer.worker.parallel.recomputed_layers import refuse_recomputed_twice
from trainer.worker.parallel.refused_models import refuse_modules, refuse_parameters
from trainer.worker.parallel.replaced_parameters import ReplacedParameters, refuse_used_ones


def share_out(
    units: Sequence[nn.Module], model: nn.Module, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy
) -> None:
    """Wrap these parts of `model` one by one, in the order in which they compute, and then the rest of it.

    `parallel.fsdp.wrap` may choose other parts; raises CannotShard for what cannot be done with this model.

    Replicas without shards (DDP) stay as they are in float32: `GradientSync` averages their gradients. With half
    precision, or in host memory, they are FSDP2 on a mesh whose inner dimension has one rank.
    """
    refuse_modules(model)
    if config.parallel.has_plain_replicas(config.train.dtype):
        mark_replica(model)
        return
    units = chosen_units(model, config.parallel.fsdp.wrap, units)
    refuse_parameters(units, model)
    before = ReplacedParameters(model)
    for module in (*units, model):
        if not isinstance(module, FSDPModule):  # experts that ranks share are, on a mesh of their own
            fully_shard(module, mesh=layout.fsdp, **fsdp_options(layout, config, policy))
    before.pass_on(model)
    if depth := config.parallel.fsdp.prefetch:
        _prefetch([unit for unit in units if isinstance(unit, FSDPModule)], depth)


def fsdp_options(layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """What `fully_shard` is told of every module, whatever its mesh is."""
    # Pinned memory is what a GPU copies from while it computes.
    pins = layout.device.type == "cuda"
    return {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pins) if offloads_all(config) else OffloadPolicy(),
        "reshard_after_forward": config.parallel.reshard_after_forward,
    }


def offloads_all(config: JobConfig) -> bool:
    """Whether shards of parameters are kept in host memory, and with them gradients and optimizer state."""
    return config.parallel.fsdp.offload == Offload.ALL


def offloads_optimizer(config: JobConfig) -> bool:
    """Whether the optimizer's state alone is kept in host memory."""
    return config.parallel.fsdp.offload == Offload.OPTIMIZER


class GradientSync:
    """Backward passes of the micro-batches of a step, with gradients that are reduced after each or after the last."""

    def __init__(
        self, model: nn.Module, layout: Layout, reduce: Reduce, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Make it when everything that is trained exists. `on_wait` as in GradientBuckets; raises CannotAverage."""
        self._model = model
        self._each = reduce is Reduce.EACH
        self._fsdp = model if isinstance(model, FSDPModule) else None
        self._buckets = _buckets(model, layout, on_wait)
        self._reduces, self._is_first = True, True
        bucketed = {id(parameter) for parameter in self._buckets.parameters} if self._buckets else set()
        self._averaged = [one for one in model.parameters() if isinstance(one, DTensor) or id(one) in bucketed]
        has_whole = layout.sizes.tp == layout.sizes.pp == 1 and layout.world_size > 1
        self._makes_equal = self._buckets is not None and has_whole
        self._compares = self._buckets is None and has_whole
        self._stages = layout.sizes.pp
        self._gradients: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Call before the first forward pass of a step."""
        if self._buckets is not None:
            self._buckets.begin_step()

    def end_step(self) -> list[torch.Tensor]:
        """All gradients that there are; there will be no more of this step."""
        if self._buckets is not None:
            self._buckets.end_step()
        self._gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return self._gradients

    def facts(self) -> GradientFacts:
        """What all ranks have to agree on after `end_step`; stages have other parameters, and compare nothing.

        Gradients of parameters that every rank has whole may be averaged by somebody else, such as torch's own DDP.
        """
        used = usage_mark(self._averaged) if self._stages == 1 else 0
        gradients, self._gradients = self._gradients, []  # held no longer than the parameters hold them
        compared = [one for one in gradients if not isinstance(one, DTensor)] if self._compares else []
        return GradientFacts(used=used, alike=self._makes_equal, compared=compared, stages=self._stages)

    def why_different(self) -> str:
        """What to say where ranks have different gradients of parameters that all of them have whole."""
        if self._buckets is not None:
            return (
                "gradients of ranks differ after parallel.strategy=ddp has averaged them: a hook has changed them, or "
                "a parameter was made after training began: make it in build_model()"
            )
        plain = [name for name, one in self._model.named_parameters() if not isinstance(one, DTensor)]
        return (
            f"gradients of {', '.join(plain[:3])} differ between ranks after the backward pass, since "
            "nobody averages them: shard the whole model in `parallelize`, its outermost module last, and make "
            "parameters in build_model()"
        )

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Compute gradients of a micro-batch, the last one of its step or another; collective.

        Plain replicas average once a step: a gradient that is an average already must not be averaged again. The first
        time raises CannotAverage for what torch would reduce wrongly.
        """
        reduces = self._each or is_last
        is_first, self._is_first = self._is_first, False
        if is_first and self._fsdp is not None:
            refuse_recomputed_twice(self._fsdp, loss)
        if self._fsdp is not None and reduces != self._reduces:
            if not reduces:
                _gather_the_unused(self._fsdp)
            self._fsdp.set_requires_gradient_sync(reduces)
            self._reduces = reduces
        if self._buckets is None or not is_last:
            loss.backward()
            if is_first:
                refuse_used_ones(self._model)
            return
        self._buckets.begin()
        loss.backward()
        self._buckets.finish()

    def reduce_now(self) -> None:
        """Average gradients that are all there, where their backward passes have not."""
        if self._buckets is not None:
            self._buckets.begin()
            self._buckets.finish()


def _buckets(model: nn.Module, layout: Layout, on_wait: Callable[[], None]) -> GradientBuckets | None:
    """Those of plain replicas; None where there are none, or nobody to average with.

    With tensor parallelism one replica needs them too: gradients of norms are sums over its ranks.
    """
    replicated = replicated_parameters(model)
    if not replicated or layout.world_size == 1:
        return None
    ids = set(map(id, replicated.values()))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ids and not isinstance(parameter, DTensor):
            raise CannotAverage(
                f"{name} was made after `parallelize`, or is outside the model that it was given: nobody would average "
                "its gradients: make it in build_model()"
            )
    group = layout.mesh["dp_replicate"].get_group()
    if group.size() == 1 and not any(isinstance(one, DTensor) for one in replicated.values()):
        return None
    require_equal(replicated, group)
    return GradientBuckets(replicated, group, on_wait, is_told=layout.sizes.pp == 1)


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
