"""Which parameters train and which modules are in train mode: saved where training has changed it, and put back."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

Flags = dict[str, bool]
_GRADIENTS, _TRAINING = "requires_grad", "training"


class ModuleModes:
    """`requires_grad` of parameters and `training` of modules, compared with those of a new model."""

    def __init__(self, model: nn.Module) -> None:
        """Make it when the model is new."""
        self._model = model
        self._built = {kind: _flags(model, kind) for kind in (_GRADIENTS, _TRAINING)}

    def facts(self) -> dict[str, Flags]:
        """Return the differences from a new model; a name that ends with a point stands for all of that module."""
        found = {kind: _changes(built, _flags(self._model, kind)) for kind, built in self._built.items()}
        return {kind: flags for kind, flags in found.items() if flags}

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Set what the facts of a checkpoint name; return in words what the model does not have."""
        unknown = []
        for kind in self._built:
            flags, used = saved.get(kind, {}), set[str]()
            for name, each in _named(self._model, kind):
                entry = next((one for one in (*_wholes(name), name) if one in flags), None)
                if entry is not None:
                    used.add(entry)
                    setattr(each, kind, flags[entry])  # not `train()`, which changes the modules inside too
            unknown += [
                f"{kind} of {name} had changed, and is not in the model" for name in sorted(flags.keys() - used)
            ]
        return unknown


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    found: Iterable[tuple[str, Any]] = model.named_parameters() if kind == _GRADIENTS else model.named_modules()
    return ((f"model.{name}" if name else "model", each) for name, each in found)


def _flags(model: nn.Module, kind: str) -> Flags:
    return {name: getattr(each, kind) for name, each in _named(model, kind)}


def _wholes(name: str) -> Iterator[str]:
    """Return `model.`, `model.layers.` and so on: what a part of the model belongs to, the largest first."""
    parts = name.split(".")
    return (".".join(parts[:count]) + "." for count in range(1, len(parts) + 1))


def _changes(built: Flags, now: Flags) -> Flags:
    """Return the values that are not as they were built; one entry for a module in which all are alike."""
    changed = [name for name, value in now.items() if name in built and built[name] != value]
    inside: dict[str, list[bool]] = {}
    for name, value in now.items() if changed else ():
        for whole in _wholes(name):
            inside.setdefault(whole, []).append(value)
    alike = {whole for whole, values in inside.items() if len(values) > 1 and len(set(values)) == 1}
    return {next((one for one in _wholes(name) if one in alike), name): now[name] for name in changed}
