"""State of the user's learning-rate schedule, with its current rates, which some schedules need to compute new ones."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from trainer.worker.workload import Scheduler, WorkloadError

_PARTS, _MILESTONES = "_schedulers", "_milestones"
"""Private names of settings in the states of torch's schedulers."""


class SchedulerState:
    """State of a scheduler, with the groups' `lr`, which is saved only here. It is empty without a scheduler."""

    def __init__(self, scheduler: Scheduler | None, optimizer: torch.optim.Optimizer) -> None:
        """Record the settings of a new scheduler."""
        self._scheduler, self._optimizer = scheduler, optimizer
        self._built = _plain_settings(scheduler.state_dict()) if scheduler is not None else {}
        self.overruled: list[str] = []
        """Messages about restored settings that differ from those of the newly built scheduler."""

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "lr": rates, "built": self._built}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Raises WorkloadError if the optimizer has a different number of groups."""
        assert self._scheduler is not None
        groups, rates = self._optimizer.param_groups, state["lr"]
        if len(groups) != len(rates):
            raise WorkloadError(
                f"the checkpoint has learning rates for {len(rates)} parameter groups, but the optimizer has "
                f"{len(groups)}"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))  # a compiled or captured step reads this tensor object
            else:
                group["lr"] = float(rate)
        self._scheduler.load_state_dict(state["scheduler"])
        kept = state["built"]
        changed = [f"{key} {kept[key]} (now {now})" for key, now in self._built.items() if kept.get(key, now) != now]
        self.overruled = [f"the checkpoint's schedule continues: {', '.join(changed)}"] if changed else []
        self._built = kept


def _plain_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings and lists in a scheduler's state. Nested settings are named like `0.step_size`."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Counter):  # the milestones of MultiStepLR
            value = sorted(value.elements())
        if key == _PARTS and isinstance(value, list):  # of SequentialLR and ChainedScheduler
            for number, part in enumerate(value):
                inner = _plain_settings(part) if isinstance(part, Mapping) else {}
                found |= {f"{number}.{name}": one for name, one in inner.items()}
        elif (not key.startswith("_") or key == _MILESTONES) and _is_plain(value):
            found[key.removeprefix("_")] = list(value) if isinstance(value, list) else value
    return found


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, (bool, int, float, str)) and one == one for one in values)
