"""AdamW on device and host, the learning-rate schedule, and the creation of optimizer state."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as of_torch
from torch.optim.adamw import adamw as torch_adamw

from trainer.contract.config import OptimizerConfig
from trainer.contract.config_sections.parallel_config import HOST_COPY_BYTES
from trainer.worker.mixture_of_experts import Experts
from trainer.worker.parallel.gradient_buckets import like_own_part, own_part


class HostAdamW(torch.optim.AdamW):
    """AdamW whose state lies in host memory and whose step runs there; parameters and gradients stay where they are.

    In each step gradients and parameters are copied to the host, and the new parameters back: 12 bytes for each.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """As AdamW's; a closure is refused."""
        assert closure is None, "the training loop computes the gradients"
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        """Some parameters at a time, so that no more than their copies need room beside the state."""
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
        held = [self._state_of(parameter) for parameter in parameters]
        weights = [_on_host(parameter) for parameter in parameters]
        gradients = [_on_host(parameter.grad) for parameter in parameters if parameter.grad is not None]
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

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter, made at its first step; a shard's state is a shard."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, device="cpu")
            state["exp_avg_sq"] = torch.zeros_like(parameter, device="cpu")
        return state


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the local part in host memory, pinned where a GPU fills it."""
    own = own_part(tensor)
    copy = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
    return copy.copy_(own, non_blocking=own.is_cuda)


def learning_rate(optimizer: OptimizerConfig, steps: int, step: int) -> float:
    """Rate of step `step` (counted from 1) of `steps`: linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    span = max(1, steps - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / span)
    floor = optimizer.lr * optimizer.min_lr_ratio
    return floor + (optimizer.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


_TINY = 1e-150
"""A rate by which no weight moves, in double precision either, and whose square is not zero."""


def adamw(model: nn.Module, optimizer: OptimizerConfig, *, on_host: bool = False) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: norms and biases are scales, not weights to shrink.

    `on_host`: its state lies in host memory, where it runs.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stacks = {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2 and id(p) not in stacks],
            "weight_decay": optimizer.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        # Experts may lie on a mesh of their own, and a fused step takes one mesh.
        {"params": [p for p in parameters if id(p) in stacks], "weight_decay": optimizer.weight_decay},
    ]
    kind = HostAdamW if on_host else OwnPartsAdamW
    fused = not any(parameter.is_complex() for parameter in parameters)
    return kind(
        [group for group in groups if group["params"]], lr=optimizer.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused
    )


class OwnPartsAdamW(torch.optim.AdamW):
    """AdamW that steps this rank's parts of sharded parameters: the same bits, without the sharding rules of a DTensor.

    A step looks at each element alone. Torch works these rules out at the first step of a process, which costs a
    restart a tenth of a second.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fills the lists of parameters, gradients and states; what lies in `state` stays sharded."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [own_part(tensor) for tensor in tensors]
        return has_complex


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A group's own `lr_scale` multiplies the schedule."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(scaled)  # a compiled or captured step reads this very tensor
        else:
            group["lr"] = scaled


def train_mode(optimizer: torch.optim.Optimizer) -> None:
    """Call `train()` of an optimizer that has it, as schedule-free ones do, whose weights are others in `eval` mode."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def optimizers_in(values: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    """Return the optimizers among some values, and in lists, tuples and dicts of them."""
    for value in values:
        for each in value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,):
            if isinstance(each, torch.optim.Optimizer):
                yield each


def clear_gradients(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], owners: Iterable[object]
) -> None:
    """Clear them after a step, also those of parameters that no optimizer has: no checkpoint has what would pile up.

    An optimizer that is an attribute of one of `owners` clears its gradients itself.
    """
    optimizer.zero_grad(set_to_none=True)
    left = [parameter for parameter in parameters if parameter.grad is not None]
    if left:
        values = [value for owner in (optimizer, *owners) for value in getattr(owner, "__dict__", {}).values()]
        groups = [group for each in (optimizer, *optimizers_in(values)) for group in each.param_groups]
        known = {id(parameter) for group in groups for parameter in group["params"]}
        for parameter in left:
            if id(parameter) not in known:
                parameter.grad = None


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Make every state tensor exist by one step of zero gradients at rate 0; the weights are restored bit for bit.

    Hooks around the step do not see it. The state keeps the traces of that step (`step` is 1): overwrite
    it from a checkpoint, or drop it.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    with _weights_kept(optimizer), _without_hooks(optimizer):
        try:
            _step_without_gradients(optimizer, 0.0)
        except ArithmeticError:
            # Some average with weights that grow with the rate: these must not all be zero.
            _step_without_gradients(optimizer, _TINY)
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _weights_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A rate of 0 does not hold every step: a fixed decay moves weights, and 0 divided by 0 is no number."""
    parameters = [own_part(parameter.detach()) for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.copy_(kept)


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A hook that counts steps, or averages weights, must not take this one for a step of training."""
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
