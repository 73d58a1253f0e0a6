"""Plain attributes of Python objects that training changes: not saved, but reported when a restart has lost them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.nested_state import Unsavable

_MAX_CHARACTERS = 1000
"""Characters of an attribute's JSON; what is longer is data, not a counter."""


@cache
def _torch_attributes() -> frozenset[str]:
    """The attributes that every optimizer has; not at import, which must compute nothing."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0))) | {"_opt_called", "_step_count"}


class UnsavedAttributes:
    """The attributes of some objects, by `<object>.<attribute>`, compared with what they were when these were made."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = dict(objects)
        self._initial = self._texts()

    def changed(self) -> dict[str, str]:
        """Those that are not as they were, as JSON text."""
        return {name: text for name, text in self._texts().items() if self._initial.get(name) != text}

    def lost(self, saved: Mapping[str, str]) -> list[str]:
        """Those of a save that are not as they were then."""
        now = self._texts()
        return sorted(name for name, text in saved.items() if now.get(name) != text)

    def _texts(self) -> dict[str, str]:
        found = {}
        for owner, each in self._objects.items():
            for key, value in getattr(each, "__dict__", {}).items():
                if not (isinstance(each, torch.optim.Optimizer) and key in _torch_attributes()):
                    text = _text(value)
                    if text is not None:
                        found[f"{owner}.{key}"] = text
        return found


def _text(value: Any) -> str | None:
    """The attribute, or what its own `state_dict` says; None for what is neither small nor plain."""
    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
        return None
    if isinstance(value, str | list | tuple | dict | set | frozenset) and len(value) > _MAX_CHARACTERS:
        return None
    tensors: dict[str, torch.Tensor] = {}
    try:
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            value = value.state_dict()
        text = nested_state.text(nested_state.encode(value, "", tensors, {}))
    except Unsavable:
        return None
    return None if tensors or len(text) > _MAX_CHARACTERS else text
