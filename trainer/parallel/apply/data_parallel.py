"""Data parallelism: FSDP2 or plain replicas, refusal of unsupported models, and comparison of replicas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from trainer.parallel.apply.fsdp_units import (
    CannotShard,
    ReplacedParameters,
    chosen_units,
    refuse_recomputed_twice,
    refuse_stale_parameters,
)
from trainer.parallel.apply.gradient_buckets import (
    CannotAverage,
    GradientBuckets,
    GradientFacts,
    mark_replica,
    own_part,
    replicated_parameters,
    usage_mark,
)
from trainer.parallel.apply.layer_wrappers import compile_forward, copy_views
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.data import Offload, Reduce
from trainer.protocol.config import JobConfig

_MODULUS = 65_521
"""Small enough for the squares of a million ranks to add up exactly in float64."""


def residue(number: torch.Tensor) -> torch.Tensor:
    """Return a float64 number that is equal on ranks whose `number`, a float64 scalar, has the same bits."""
    return number.view(torch.int64).remainder(_MODULUS).double()


def are_equal(count: int, total: float, squares: float) -> bool:
    """Return whether `count` residues with this sum and sum of squares are all equal."""
    return count * squares == total * total


def require_equal(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Raise CannotAverage unless all ranks of the group have the same weights; collective."""
    tensors = (own_part(one).detach() for one in parameters.values())
    own = [one for one in tensors if one.numel() and (one.is_floating_point() or one.is_complex())]
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(own)])
    mark = residue((norms * torch.arange(1, len(norms) + 1, device=norms.device)).sum())
    sums = torch.stack([mark, mark * mark])
    dist.all_reduce(sums, group=group)
    if not are_equal(group.size(), *sums.tolist()):
        raise CannotAverage(
            "ranks start with different weights, and parallel.strategy=ddp averages only gradients: build the model "
            "from the same random numbers on every rank (orch has seeded them), or from the same file"
        )


def mixed_precision(config: JobConfig) -> MixedPrecisionPolicy:
    """Return the precision policy: half precision with gradients reduced in float32, or float32 throughout."""
    if config.train.dtype == "float32":
        return MixedPrecisionPolicy()
    half = torch.float16 if config.train.dtype == "float16" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)


def layer_precision(config: JobConfig) -> MixedPrecisionPolicy:
    """Return the policy for the built-in model's layers, without casting inputs, which would round the rotary table."""
    return replace(mixed_precision(config), cast_forward_inputs=False)


_DDP = "type parallel.strategy=ddp train.dtype=float32"
"""Remedy that leaves parameters unsharded."""


def refuse_modules(model: nn.Module) -> None:
    """Raise CannotShard for modules that would fail even with replicas."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise CannotShard(f"{name} has no shape yet (a lazy module): give it a batch in build_model()")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise CannotShard(
                f"{name}.max_norm={module.max_norm}: the forward pass would change weights, in the rows that "
                "each rank uses: leave max_norm out"
            )
        if module.sparse:
            raise CannotShard(f"{name}.sparse=True: ranks' gradients are averaged as dense tensors: leave sparse out")


def refuse_parameters(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise CannotShard, with the names of parameters that FSDP would reject during a step or handle wrongly."""
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise CannotShard(
            f"build_model() returns a {type(model).__name__}, which is never called itself, so FSDP cannot gather "
            "parameters that belong to the whole model: return a module with a forward() that has it as an attribute, "
            f"or {_DDP}"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        _refuse_one(name, parameter)
    taken: set[int] = set()
    for unit in (*units, model):
        members = [one for one in unit.parameters() if id(one) not in taken]
        taken |= {id(one) for one in members}
        own = [one for one in members if one.requires_grad]
        for parameter in own:
            if parameter.dtype != own[0].dtype:
                first, other = (f"{names[id(one)]} ({_dtype(one)})" for one in (own[0], parameter))
                raise CannotShard(
                    f"parameters {first} and {other} "
                    "are sharded together and must have the same type: model.float(), or put them into separate modules"
                )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_one(name: str, parameter: nn.Parameter) -> None:
    if not parameter.dim():
        raise CannotShard(f"parameter {name} has no dimension: give it one, as nn.Parameter(value.reshape(1))")
    if parameter.is_complex():
        # torch 2.13: an optimizer's view_as_real of a shard is a copy, so only weight decay changes the parameter.
        raise CannotShard(f"parameter {name} is complex, and optimizers do not update its shards: {_DDP}")
    if not parameter.is_contiguous():
        raise CannotShard(f"parameter {name} is not contiguous: use nn.Parameter(value.contiguous())")
    hooks = "a hook of its own, which FSDP drops with the parameter that it replaces"
    if parameter._post_accumulate_grad_hooks:
        raise CannotShard(f"{name} has {hooks}: use optimizer.register_step_pre_hook in build_optimizer()")
    if parameter._backward_hooks:
        raise CannotShard(f"{name} has {hooks}: {_DDP}")


def apply(model: Any, layout: Layout, config: JobConfig) -> None:
    """Shard or replicate the built-in model, with a unit for each layer; compile its layers first."""
    if config.train.compile:
        for layer in model.layers:
            compile_forward(layer)
    apply_data_parallel(model.layers, model, layout, config, layer_precision(config))


def apply_data_parallel(
    units: Sequence[nn.Module], model: nn.Module, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy,
    whole: Collection[nn.Parameter] = (),
) -> None:  # fmt: skip
    """Wrap `units` of `model`, or the units chosen by `parallel.fsdp.wrap`, then the whole model. Raises CannotShard.

    Replicas in float32 (DDP) stay plain modules, whose gradients `GradientSync` averages. `whole` are frozen parameters
    that each rank keeps as they are.
    """
    refuse_modules(model)
    if config.parallel.has_plain_replicas(config.train.dtype):
        mark_replica(model)
        return
    units = chosen_units(model, config.parallel.fsdp.wrap, units)
    refuse_parameters(units, model)
    before = ReplacedParameters(model)
    for module in (*units, model):
        if not isinstance(module, FSDPModule):  # shared experts are already wrapped, on their own mesh
            copy_views(module)
            options = fsdp_options(layout, config, policy)
            fully_shard(module, mesh=layout.fsdp, ignored_params=set(whole) or None, **options)
    before.copy_attributes(model)
    if depth := config.parallel.fsdp.prefetch:
        _prefetch([unit for unit in units if isinstance(unit, FSDPModule)], depth)


def fsdp_options(layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that are the same for every module and mesh."""
    # A GPU can copy from pinned memory while it computes.
    pins = layout.device.type == "cuda"
    return {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pins) if offloads_all(config) else OffloadPolicy(),
        "reshard_after_forward": config.parallel.reshard_after_forward,
    }


def offloads_all(config: JobConfig) -> bool:
    """Return whether shards of parameters, with their gradients and optimizer state, are kept in host memory."""
    return config.parallel.fsdp.offload == Offload.ALL


def offloads_optimizer(config: JobConfig) -> bool:
    """Return whether only the optimizer's state is kept in host memory."""
    return config.parallel.fsdp.offload == Offload.OPTIMIZER


class GradientSync:
    """Runs a step's backward passes; gradients are reduced after each micro-batch or after the last."""

    def __init__(
        self, model: nn.Module, layout: Layout, reduce: Reduce, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Create this once all trained parameters exist. `on_wait`: see GradientBuckets. Raises CannotAverage."""
        self._model = model
        self._each = reduce is Reduce.EACH
        self._fsdp = model if isinstance(model, FSDPModule) else None
        self._buckets = _buckets(model, layout, on_wait)
        self._reduces, self._is_first = True, True
        bucketed = {id(parameter) for parameter in self._buckets.parameters} if self._buckets else set()
        self._averaged = [one for one in model.parameters() if isinstance(one, DTensor) or id(one) in bucketed]
        has_whole = layout.sizes["tp"] == layout.sizes["pp"] == 1 and layout.world_size > 1
        self._makes_equal = self._buckets is not None and has_whole
        self._compares = self._buckets is None and has_whole
        self._stages = layout.sizes["pp"]
        self._gradients: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Start a step; call this before its first forward pass."""
        if self._buckets is not None:
            self._buckets.begin_step()

    def end_step(self) -> list[torch.Tensor]:
        """End the step and return all of its gradients."""
        if self._buckets is not None:
            self._buckets.end_step()
        self._gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return self._gradients

    def facts(self) -> GradientFacts:
        """Return the gradient facts that ranks compare after `end_step`; pipeline stages compare nothing."""
        used = usage_mark(self._averaged) if self._stages == 1 else 0
        gradients, self._gradients = self._gradients, []  # released as soon as the parameters release them
        compared = [one for one in gradients if not isinstance(one, DTensor)] if self._compares else []
        return GradientFacts(used=used, alike=self._makes_equal, compared=compared, stages=self._stages)

    def why_different(self) -> str:
        """Return the message for unsharded parameters whose gradients differ between ranks."""
        if self._buckets is not None:
            return (
                "ranks' gradients differ after parallel.strategy=ddp averaged them: a hook has changed them, or "
                "a parameter was created after training began: create it in build_model()"
            )
        plain = [name for name, one in self._model.named_parameters() if not isinstance(one, DTensor)]
        return (
            f"gradients of {', '.join(plain[:3])} differ between ranks after the backward pass, because "
            "nothing averages them: shard the whole model in `parallelize`, its outermost module last, and create "
            "parameters in build_model()"
        )

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Compute a micro-batch's gradients; collective. Plain replicas average once per step.

        The first call raises CannotAverage for models whose gradients torch would reduce wrongly.
        """
        reduces = self._each or is_last
        is_first, self._is_first = self._is_first, False
        if is_first and self._fsdp is not None:
            refuse_recomputed_twice(self._fsdp, loss)
        if self._fsdp is not None and reduces != self._reduces:
            if not reduces:
                _gather_unused_units(self._fsdp)
            self._fsdp.set_requires_gradient_sync(reduces)
            self._reduces = reduces
        if self._buckets is None or not is_last:
            loss.backward()
            if is_first:
                refuse_stale_parameters(self._model)
            return
        self._buckets.begin()
        loss.backward()
        self._buckets.finish()

    def reduce_now(self) -> None:
        """Average the accumulated gradients, which no backward pass has averaged."""
        if self._buckets is not None:
            self._buckets.begin()
            self._buckets.finish()


def _buckets(model: nn.Module, layout: Layout, on_wait: Callable[[], None]) -> GradientBuckets | None:
    """Return the buckets of plain replicas; None without replicas, or with a single rank.

    With tensor parallelism, a single replica needs them too, because the gradients of norms are sums over its ranks.
    """
    replicated = replicated_parameters(model)
    if not replicated or layout.world_size == 1:
        return None
    ids = set(map(id, replicated.values()))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ids and not isinstance(parameter, DTensor):
            raise CannotAverage(
                f"{name} was created after `parallelize`, or outside the model passed to it, so nothing would average "
                "its gradients: create it in build_model()"
            )
    group = layout.mesh["dp_replicate"].get_group()
    if group.size() == 1 and not any(isinstance(one, DTensor) for one in replicated.values()):
        return None
    require_equal(replicated, group)
    return GradientBuckets(replicated, group, on_wait, uses_hooks=layout.sizes["pp"] == 1)


def _gather_unused_units(model: FSDPModule) -> None:
    """Gather each unit that no forward pass has used yet, because torch 2.13 fails when it reads its gradients."""
    for unit in _fsdp_modules(model):
        groups = unit._get_fsdp_state()._fsdp_param_groups
        if any(not hasattr(parameter, "_unsharded_param") for group in groups for parameter in group.fsdp_params):
            unit.unshard()
            unit.reshard()


def _fsdp_modules(model: FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, number - depth) : number])))
