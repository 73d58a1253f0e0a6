"""AdamW in host memory: where a GPU has room for parameters and gradients, and none for the optimizer's state."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from trainer.contract.config_sections.parallel_config import HOST_COPY_BYTES
from trainer.worker.parallel.own_part import own_part


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
        adamw(
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
