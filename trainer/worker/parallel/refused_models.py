"""What of a model its data-parallel ranks cannot share, or would get wrong without a word: refused by name."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainer.worker.parallel.fsdp_units import CannotShard

_DDP = "type parallel.strategy=ddp train.dtype=float32"
"""Parameters then stay what they are."""


def refuse_modules(model: nn.Module) -> None:
    """Raise CannotShard for what goes wrong with replicas, too."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise CannotShard(f"{name} has no shape yet (a lazy module): give it a batch in build_model()")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise CannotShard(
                f"{name}.max_norm={module.max_norm}: the forward pass would change weights, on each rank the rows that "
                "it uses: leave max_norm out"
            )
        if module.sparse:
            raise CannotShard(f"{name}.sparse=True: gradients of ranks are averaged as dense tensors: leave sparse out")


def refuse_parameters(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise CannotShard, with the names, for parameters that FSDP would refuse in the midst of a step, or get wrong."""
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise CannotShard(
            f"build_model() returns a {type(model).__name__}, which is never called itself, so that FSDP cannot gather "
            f"what belongs to the whole: return a module with a forward() that has it as an attribute, or {_DDP}"
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
                    "are sharded together and must have one type: model.float(), or put them into modules of their own"
                )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_one(name: str, parameter: nn.Parameter) -> None:
    if not parameter.dim():
        raise CannotShard(f"parameter {name} has no dimension: give it one, as nn.Parameter(value.reshape(1))")
    if parameter.is_complex():
        # torch 2.13: an optimizer's view_as_real of a shard is a copy, and only weight decay moves the parameter.
        raise CannotShard(f"parameter {name} is complex, and optimizers do not move shards of it: {_DDP}")
    if not parameter.is_contiguous():
        raise CannotShard(f"parameter {name} is not contiguous: make it so, as nn.Parameter(value.contiguous())")
    hooks = "a hook of its own, which FSDP drops with the parameter that it replaces"
    if parameter._post_accumulate_grad_hooks:
        raise CannotShard(f"{name} has {hooks}: use optimizer.register_step_pre_hook in build_optimizer()")
    if parameter._backward_hooks:
        raise CannotShard(f"{name} has {hooks}: {_DDP}")
