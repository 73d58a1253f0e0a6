"""A learning-rate schedule of the user's own, with the rates that it has set: some compute the next from the last."""

from typing import Any

import torch

from trainer.worker.workload import Scheduler, WorkloadError


class SchedulerState:
    """The state of a scheduler, with `lr` of the optimizer's groups, which nobody else saves; None has no state."""

    def __init__(self, scheduler: Scheduler | None, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises WorkloadError when the optimizer has another number of groups."""
        assert self._scheduler is not None
        groups, rates = self._optimizer.param_groups, state["lr"]
        if len(groups) != len(rates):
            raise WorkloadError(
                f"the checkpoint has learning rates of {len(rates)} parameter groups, the optimizer has {len(groups)}"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))  # a compiled or captured step reads this very tensor
            else:
                group["lr"] = float(rate)
        self._scheduler.load_state_dict(state["scheduler"])
