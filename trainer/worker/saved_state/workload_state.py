"""What a workload itself asks to be saved, by a `state_dict` and a `load_state_dict` of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.nested_state import Unsavable
from trainer.worker.saved_state.tensor_metadata import tensor_metadata, zeros
from trainer.worker.workload import WorkloadError

PREFIX = "workload"


class WorkloadState:
    """The state of one workload; a workload without the two methods has none."""

    def __init__(self, workload: object, model: nn.Module, device: torch.device) -> None:
        self._workload, self._device = workload, device
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._targets: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name; raises WorkloadError when something in it cannot be kept."""
        return self._encoded()[1]

    def facts(self) -> dict[str, Any]:
        """The rest of it, in JSON; nothing when it has no state."""
        value, tensors = self._encoded()
        return (
            {"value": value, "forms": {key: tensor_metadata(tensor) for key, tensor in tensors.items()}}
            if value
            else {}
        )

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ask = getattr(self._workload, "state_dict", None)
        state = ask() if callable(ask) else {}
        found: dict[str, torch.Tensor] = {}
        try:
            return (nested_state.encode(state, PREFIX, found, self._names) if state else None), found
        except Unsavable as reason:
            raise WorkloadError(f"what {type(self._workload).__name__}.state_dict() returns: {reason}") from reason

    def targets(self, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Memory for the tensors of a checkpoint with these facts."""
        live = self.tensors()
        self._targets = {}
        for key, wanted in facts.get("forms", {}).items():
            made = zeros(wanted, (live.get(key), *self._parameters.values()), self._device)
            if made is None:
                raise WorkloadError(f"the checkpoint has {key} {wanted}, but no parameter is sharded alike")
            self._targets[key] = made
        return self._targets

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Hand the workload what it has saved; nothing when the checkpoint has nothing of it."""
        if facts:
            state = nested_state.decode(facts["value"], self._targets, self._parameters)
            self._workload.load_state_dict(state)  # type: ignore[attr-defined]
