"""AdamW on device and host, the learning-rate schedule, and the creation of optimizer state."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as of_torch
from torch.optim.adamw import adamw as torch_adamw

from trainer.parallel.apply.expert_parallel import ExpertStacks
from trainer.parallel.apply.gradient_buckets import like_own_part, own_part
from trainer.parallel.data import HOST_COPY_BYTES
from trainer.protocol.config import OptimizerConfig


class HostAdamW(torch.optim.AdamW):
    """AdamW whose state and step are in host memory; parameters and gradients stay on their device.

    Each step copies gradients and parameters to the host and the new parameters back: 12 bytes per parameter.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step like AdamW; closures are not supported."""
        assert closure is None, "the training loop computes the gradients"
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step a few parameters at a time, so that only their copies need memory beyond the state."""
        some: list[torch.Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                some.append(parameter)
            if sum(own_part(one).nbytes for one in some) >= HOST_COPY_BYTES:
                self._step_some(some, group)
                some = []
        self._step_some(some, group)

    def _step_some(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        held = [self._ensure_state(parameter) for parameter in parameters]
        weights = [_copy_to_host(parameter) for parameter in parameters]
        gradients = [_copy_to_host(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if parameters[0].is_cuda:
            torch.cuda.current_stream(parameters[0].device).synchronize()
        torch_adamw(
            weights, gradients,
            [own_part(state["exp_avg"]) for state in held],
            [own_part(state["exp_avg_sq"]) for state in held],
            [],
            [state["step"] for state in held],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for parameter, weight in zip(parameters, weights, strict=True):
            own_part(parameter).copy_(weight, non_blocking=True)

    def _ensure_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state, creating it if it has none. A sharded parameter's state is sharded too."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, device="cpu")
            state["exp_avg_sq"] = torch.zeros_like(parameter, device="cpu")
        return state


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    own = own_part(tensor)
    copy = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
    return copy.copy_(own, non_blocking=own.is_cuda)


def learning_rate(optimizer: OptimizerConfig, steps: int, step: int) -> float:
    """Return the learning rate at `step` (from 1) of `steps`: linear warm-up, then cosine decay to `min_lr_ratio`."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    span = max(1, steps - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / span)
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


_TINY = 1e-150
"""A rate too small to change a weight, even in double precision, whose square is not zero."""


def adamw(model: nn.Module, optimizer: OptimizerConfig, *, on_host: bool = False) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on matrices only. With `on_host`, its state and step are in host memory."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stacks = {id(p) for module in model.modules() if isinstance(module, ExpertStacks) for p in module.parameters()}
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2 and id(p) not in stacks],
            "weight_decay": optimizer.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        # Experts may be on a mesh of their own, and a fused step requires a single mesh.
        {"params": [p for p in parameters if id(p) in stacks], "weight_decay": optimizer.weight_decay},
    ]
    kind = HostAdamW if on_host else OwnPartsAdamW
    fused = not any(parameter.is_complex() for parameter in parameters)
    return kind(
        [group for group in groups if group["params"]], lr=optimizer.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused
    )


class OwnPartsAdamW(torch.optim.AdamW):
    """AdamW on local shards. It avoids DTensor's sharding rules, which delay the first step by 0.1 s."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill the lists with local parts of the parameters, gradients and states. Tensors in `state` stay sharded."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [own_part(tensor) for tensor in tensors]
        return has_complex


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group, multiplied by the group's own `lr_scale`."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(scaled)  # a compiled or captured step reads this tensor object
        else:
            group["lr"] = scaled


def train_mode(optimizer: torch.optim.Optimizer) -> None:
    """Call `train()` if the optimizer has it. Schedule-free optimizers have different weights in `eval` mode."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def find_optimizers(values: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers among these values, including those nested in lists, tuples and dicts."""
    for value in values:
        for each in value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,):
            if isinstance(each, torch.optim.Optimizer):
                yield each


def clear_gradients(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], owners: Iterable[object]
) -> None:
    """Clear all gradients after a step, except those of optimizers that `owners` hold as attributes."""
    optimizer.zero_grad(set_to_none=True)
    left = [parameter for parameter in parameters if parameter.grad is not None]
    if left:
        values = [value for owner in (optimizer, *owners) for value in getattr(owner, "__dict__", {}).values()]
        groups = [group for each in (optimizer, *find_optimizers(values)) for group in each.param_groups]
        known = {id(parameter) for group in groups for parameter in group["params"]}
        for parameter in left:
            if id(parameter) not in known:
                parameter.grad = None


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Create every state tensor by taking a step with zero gradients and a rate of 0. The weights do not change.

    Hooks are not called. The caller must overwrite or drop the state, because it counts this step.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    with _preserve_weights(optimizer), _without_hooks(optimizer):
        try:
            _step_without_gradients(optimizer, 0.0)
        except ArithmeticError:
            # Some optimizers average with weights that grow with the rate; these must not all be zero.
            _step_without_gradients(optimizer, _TINY)
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _preserve_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the weights afterwards, because even at rate 0, a fixed decay changes them and 0 / 0 gives NaN."""
    parameters = [own_part(parameter.detach()) for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.copy_(kept)


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable hooks, which may count steps or average weights, because this step is not training."""
    every: list[Any] = [of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks]
    every += [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    before = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(every, before, strict=True):
            hooks.update(kept)


def _step_without_gradients(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            parameter.grad = like_own_part(torch.zeros_like(own_part(parameter.detach())), parameter)
    optimizer.step()
