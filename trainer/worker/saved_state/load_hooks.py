"""Load hooks: the model's own `load_state_dict` code, run again to derive values from the restored state."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from trainer.worker.saved_state.model_state import cannot_be_filled


def run_load_hooks(model: nn.Module) -> list[str]:
    """Run the load hooks of a filled model in torch's order and return the errors that they report.

    Tensors in modules that load their own state or have pre-hooks are preserved.
    """
    if not any(_loads_itself(module) or _post_hooks(module) for module in model.modules()):
        return []
    state, errors = model.state_dict(), list[str]()
    _load(model, state, "", getattr(state, "_metadata", {}), errors)
    return errors


def _load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], errors: list[str]
) -> None:
    # Torch's own wrappers rename the entries for inner modules in a pre-hook.
    if _loads_itself(module) or module._load_state_dict_pre_hooks:
        with _preserve_tensors(module):
            module._load_from_state_dict(state, prefix, metadata.get(prefix[:-1], {}), True, [], [], errors)
    for name, child in module._modules.items():
        if child is not None:
            inner = f"{prefix}{name}."
            found = {key: value for key, value in state.items() if key.startswith(inner)}
            _load(child, found, inner, metadata, errors)
    for hook in _post_hooks(module):
        hook(module, _IncompatibleKeys([], []))


@contextmanager
def _preserve_tensors(module: nn.Module) -> Iterator[None]:
    """Restore the module's own parameters and persistent buffers on exit."""
    parameters = dict(module._parameters)
    buffers = {key: one for key, one in module._buffers.items() if key not in module._non_persistent_buffers_set}
    live = [one.detach() for one in (*parameters.values(), *buffers.values()) if one is not None]
    copies = [(one, one.clone()) for one in live if not cannot_be_filled(one)]
    yield
    module._parameters.update(parameters)
    module._buffers.update(buffers)
    with torch.no_grad():
        for one, copy in copies:
            one.copy_(copy)


def _loads_itself(module: nn.Module) -> bool:
    hooks = module._load_state_dict_pre_hooks.values()
    return not all(map(_is_of_torch, (type(module)._load_from_state_dict, *hooks)))


def _post_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._load_state_dict_post_hooks.values() if not _is_of_torch(hook)]


def _is_of_torch(function: Any) -> bool:
    """Return whether torch defines this function. Torch's layers derive no values when they load."""
    function = getattr(function, "hook", function)  # torch wraps a pre-hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
