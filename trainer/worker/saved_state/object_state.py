"""What an object of the user's asks to be saved, by a `state_dict` and a `load_state_dict` of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.nested_state import Unsavable
from trainer.worker.saved_state.tensor_metadata import tensor_metadata, zeros
from trainer.worker.workload import WorkloadError


class ObjectState:
    """The state of one object, whose tensors are named `<prefix>...`; an object without the two methods has none."""

    def __init__(self, owner: object, prefix: str, model: nn.Module, device: torch.device, *, called: str = "") -> None:
        """`called`: the class of the user's, where `owner` only wraps it."""
        self._owner, self._prefix, self._device = owner, prefix, device
        self._called = called or type(owner).__name__
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._targets: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name; raises WorkloadError when something in it cannot be kept."""
        return self._encoded()[1]

    def facts(self) -> dict[str, Any]:
        """The rest of it, in JSON; nothing when it has no state."""
        value, tensors = self._encoded()
        if not value:
            return {}
        return {"value": value, "forms": {key: tensor_metadata(tensor) for key, tensor in tensors.items()}}

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ask = getattr(self._owner, "state_dict", None)
        state = ask() if callable(ask) else {}
        found: dict[str, torch.Tensor] = {}
        try:
            return (nested_state.encode(state, self._prefix, found, self._names) if state else None), found
        except Unsavable as reason:
            raise WorkloadError(f"what {self._called}.state_dict() returns: {reason}") from reason

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

    def restored(self, facts: Mapping[str, Any]) -> Any:
        """What it has saved, with its tensors as they have been filled."""
        return nested_state.decode(facts["value"], self._targets, self._parameters)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Hand the object what it has saved; nothing when the checkpoint has nothing of it."""
        if facts:
            self._owner.load_state_dict(self.restored(facts))  # type: ignore[attr-defined]
