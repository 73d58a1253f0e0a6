"""Entries of a model's `state_dict()` that are neither parameters, buffers nor extra state: nothing restores them."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.nested_state import Unsavable
from trainer.worker.workload import WorkloadError

_EXTRA = "_extra_state"


class ModelEntries:
    """Refuses such entries by name: tensors at once, plain values once training has changed them."""

    def __init__(self, model: nn.Module) -> None:
        """Make it when the model is new; raises WorkloadError."""
        self._model = model
        self._built = self._texts()

    def refuse_changed(self) -> None:
        """Raise WorkloadError if an entry has changed since the model was built."""
        if self._built:
            now = self._texts()
            for name in sorted(now.keys() | self._built.keys()):
                if now.get(name) != self._built.get(name):
                    raise _error(name, "has changed")

    def _texts(self) -> dict[str, str]:
        model = self._model
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        found: dict[str, str] = {}
        for name, value in model.state_dict().items():
            if name in known or name.rpartition(".")[2] == _EXTRA:
                continue
            if isinstance(value, torch.Tensor):
                if _address(value) not in _addresses(model):  # else it is one of them under another name
                    raise _error(name, "is a tensor")
            else:
                found[name] = _text(name, value)
        return found


def _address(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def _addresses(model: nn.Module) -> set[int]:
    return {_address(each) for each in (*model.parameters(), *model.buffers()) if each.layout is torch.strided}


def _text(name: str, value: Any) -> str:
    try:
        return nested_state.text(nested_state.encode(value, name, {}, {}))
    except Unsavable:
        return f"{type(value)} {id(value)}"


def _error(name: str, what: str) -> WorkloadError:
    return WorkloadError(
        f"{name} in the model's state_dict() {what}, and is no parameter, buffer or extra state of a module, so that a "
        "restart could not restore it: use register_buffer(), or get_extra_state() and set_extra_state()"
    )
