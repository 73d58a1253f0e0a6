"""Refuses optimizers that cannot be trained with or saved here, with the reason and what to do."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state.nested_state import Names
from trainer.worker.workload import WorkloadError

_SHARDING_MESSAGES = ("Sharding propagation", "sharding strategy", "DTensor", "redistribut")


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_dict()` may hold more than torch itself puts there."""
    changed = "state_dict" in vars(optimizer) or bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))
    return changed or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def refuse_hidden_state(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Raises WorkloadError for state that `optimizer.state` has for no parameter, or does not have at all.

    To be called when all state is made.
    """
    kind = type(optimizer).__name__
    for key, held in optimizer.state.items():
        of_parameter = isinstance(key, torch.Tensor) and key in names
        if held and not of_parameter and not isinstance(key, str):
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise WorkloadError(
                f"{kind} keeps state for {what}, which is no parameter of the model, so that it would not be saved: "
                "keep it in `optimizer.state[parameter]`, or under a name, as in `optimizer.state['masters']`"
            )
    if _is_elsewhere(optimizer):
        raise WorkloadError(
            f"{kind} keeps state in other optimizers, not in its own `state`, so that it would not be saved: let its "
            "`state` be theirs, as in `self.state[parameter] = inner.state[parameter]`, or choose one optimizer"
        )


def _is_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    state = optimizer.state
    if has_own_state_dict(optimizer):
        packed = optimizer.state_dict().get("state") or {}
        return (bool(packed) and not state) or _tensors(packed) > _tensors(state)
    inside = (inner for inner in _inner(vars(optimizer).values()) if inner is not optimizer)
    return any(held and state.get(key) is not held for inner in inside for key, held in inner.state.items())


def _inner(values: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif type(value) in (list, tuple):
            yield from (each for each in value if isinstance(each, torch.optim.Optimizer))
        elif type(value) is dict:
            yield from (each for each in value.values() if isinstance(each, torch.optim.Optimizer))


def _tensors(value: Any) -> int:
    """How many tensors there are in a nested value."""
    if isinstance(value, Mapping):
        return sum(map(_tensors, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensors, value))
    return int(isinstance(value, torch.Tensor))


def refuse_foreign(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Raises WorkloadError when a parameter of the optimizer is none of the model's."""
    for group in optimizer.param_groups:
        foreign = [parameter for parameter in group["params"] if parameter not in names]
        if foreign:
            raise WorkloadError(
                f"{type(optimizer).__name__} trains a parameter of shape {tuple(foreign[0].shape)} that the model does "
                "not have, so that neither it nor its state would be saved: register it with the model"
            )


def refuse_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises WorkloadError for an optimizer whose steps the training loop cannot make."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"{kind} computes the loss several times in one step (`step(closure)`), but the training loop computes it "
            "once: choose an optimizer whose `step()` needs no closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise WorkloadError(f"{kind} needs sparse gradients, which cannot be reduced and clipped here: choose Adam")


def refuse_sharding(optimizer: torch.optim.Optimizer, names: Names, error: Exception) -> None:
    """Raises WorkloadError when `error` says that it needs whole parameters, as one that flattens or factors does."""
    sharded = any(isinstance(parameter, DTensor) for parameter in names)
    if sharded and any(word in str(error) for word in _SHARDING_MESSAGES):
        kind = type(optimizer).__name__
        raise WorkloadError(
            f"{kind} cannot make a step on sharded parameters ({str(error).splitlines()[0]}): choose an optimizer "
            "that works element by element, or give the workload a `parallelize` that does not shard"
        ) from error
