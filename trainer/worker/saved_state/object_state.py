"""What an object of the user's asks to be saved, by a `state_dict` and a `load_state_dict` of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.differing_tensors import differing_tensors
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
        self._own_names: dict[str, str] = {}
        self._answer: tuple[Any, dict[str, torch.Tensor]] | None = None

    @contextmanager
    def asked_once(self) -> Iterator[None]:
        """Inside, its tensors and the rest are parts of one answer: a thread of the object's may move on meanwhile."""
        self._answer = self._ask()
        try:
            yield
        finally:
            self._answer = None

    def separate_ranks(self, rank: int) -> None:
        """Collective: from now on, save tensors that differ between ranks once per rank, under separate names."""
        if callable(getattr(self._owner, "state_dict", None)):
            shared = {key: one for key, one in self.tensors().items() if key not in self._own_names.values()}
            for key in differing_tensors(shared):
                self._own_names[key] = f"{self._prefix}/rank-{rank:05d}{key.removeprefix(self._prefix)}"

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
        value, found = self._answer or self._ask()
        own = self._own_names
        return nested_state.rename_tensors(value, own), {own.get(key, key): tensor for key, tensor in found.items()}

    def _ask(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ask = getattr(self._owner, "state_dict", None)
        state = ask() if callable(ask) else {}
        found: dict[str, torch.Tensor] = {}
        try:
            value = nested_state.encode(state, self._prefix, found, self._names) if state else None
        except Unsavable as reason:
            raise WorkloadError(f"what {self._called}.state_dict() returns: {reason}") from reason
        return _merge_references(value, found)

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
        if not facts:
            return
        load = getattr(self._owner, "load_state_dict", None)
        if not callable(load):
            raise WorkloadError(
                f"the checkpoint has a state of the {self._prefix}, but {self._called} has no load_state_dict(): put "
                "the code back as it was, or add one"
            )
        load(self.restored(facts))


def _merge_references(value: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Give a tensor that a state holds twice one name: as with `torch.save`, it is one tensor again after a load."""
    first: dict[Any, str] = {}
    names: dict[str, str] = {}
    for path, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            memory = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            names[path] = first.setdefault(memory, path)
    merged = {path: name for path, name in names.items() if path != name}
    kept = {path: tensor for path, tensor in tensors.items() if path not in merged}
    return (nested_state.rename_tensors(value, merged) if merged else value), kept
