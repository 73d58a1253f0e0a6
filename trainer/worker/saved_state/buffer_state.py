"""Persistent buffers in whatever form training has given them: late, grown, of another type, shared, or None.

A restart rebuilds the model with the buffers of the first step. A save records every difference in the facts of the
rank, so that the restart can allocate these buffers and put them in place.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state import checkpoint_contents
from trainer.worker.saved_state.checkpoint_contents import buffer_slots, buffers_name
from trainer.worker.saved_state.tensor_metadata import tensor_metadata, zeros
from trainer.worker.workload import WorkloadError

Description = list[Any] | dict[str, str] | None
"""Description of a buffer in JSON: its metadata, `{"same": NAME}` for a shared buffer, or None."""


def cannot_be_filled(tensor: torch.Tensor) -> bool:
    """Whether nothing can be copied into a tensor: its values share memory, or are kept as their conjugates."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if part.layout is not torch.strided or part.is_nested:
        return False
    if part.is_conj() or part.is_neg():
        return True
    return any(size > 1 and stride == 0 for size, stride in zip(part.shape, part.stride(), strict=True))


class BufferState:
    """The persistent buffers of one rank's model, described for a save and put back at a restore."""

    def __init__(self, model: nn.Module, rank: int, device: torch.device) -> None:
        """Record the buffers of a newly built model."""
        self._model, self._rank, self._device = model, rank, device
        self._built = _describe(model)
        self._modules = {name for name, _ in model.named_modules()}
        self._alike = checkpoint_contents.alike_on_all_ranks(model)
        self._targets: dict[str, torch.Tensor] = {}
        self._wanted: dict[str, Description] = {}

    def facts(self) -> dict[str, Any]:
        """Return the buffers' differences from a new model, in JSON; raises WorkloadError for one in a new module."""
        now = _describe(self._model)
        changed = {name: form for name, form in now.items() if name not in self._built or self._built[name] != form}
        for name, form in changed.items():
            if name.rpartition(".")[0] not in self._modules:
                raise WorkloadError(
                    f"buffer {name} is in a module that was made after build_model(), so that a restart could not "
                    "restore it: make the module in build_model()"
                )
            if isinstance(form, list) and form[-1]:
                raise WorkloadError(
                    f"buffer {name} became a sharded tensor of shape {form[1]} after build_model(), so that a restart "
                    "could not restore it: register it in build_model() with its final shape"
                )
        gone = sorted(self._built.keys() - now.keys())
        return {key: value for key, value in {"changed": changed, "gone": gone}.items() if value}

    def targets(self, states: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Allocate the buffers of a checkpoint with the facts `saved` and the ranks' `states`.

        A rank beyond the saving world size begins with the buffers of rank 0.
        """
        self._wanted = self._describe_wanted(states[self._rank if self._rank < len(states) else 0])
        live = checkpoint_contents.persistent_buffers(self._model)
        found = {name: self._room(name, form, live) for name, form in self._wanted.items() if isinstance(form, list)}
        ranks = saved.get("ranks")  # not saved by older versions: then both are read if they exist
        self._source = self._rank if ranks is None or self._rank < ranks else 0
        self._targets = self._keys(found, self._source, saved)
        if ranks is None and self._rank:
            first = {name: torch.zeros_like(buffer) for name, buffer in found.items()}
            self._targets = {**self._keys(first, 0, saved), **self._targets}
        return self._targets

    def _describe_wanted(self, state: Mapping[str, Any]) -> dict[str, Description]:
        facts = state.get("buffers", {})
        gone = set(facts.get("gone", ()))
        wanted = {name: form for name, form in self._built.items() if name not in gone}
        for name, form in facts.get("changed", {}).items():
            if name.rpartition(".")[0] not in self._modules:
                raise WorkloadError(
                    f"the checkpoint has buffer {name}, of a module that the model does not have: put the code back as "
                    "it was"
                )
            wanted[name] = form
        return wanted

    def _room(self, name: str, form: list[Any], live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        there = live.get(name)
        if there is not None and tensor_metadata(there) == form and not cannot_be_filled(there):
            return there
        made = zeros(form, (there,), self._device)
        if made is None:
            raise WorkloadError(f"the checkpoint has buffer {name} {form}, which the model does not have")
        return made

    def _keys(
        self, buffers: Mapping[str, torch.Tensor], rank: int, saved: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        shared = {name for name, one in buffers.items() if name in self._alike or isinstance(one, DTensor)}
        own = {f"{buffers_name(rank)}{name}": one for name, one in buffers.items() if name not in shared}
        of_rank = checkpoint_contents.of_each_rank(own, saved)
        rest = {f"model/{key.removeprefix(buffers_name(rank))}": own[key] for key in own.keys() - of_rank.keys()}
        return {**of_rank, **rest, **{f"model/{name}": buffers[name] for name in shared}}

    def restore(self, absent: Collection[str]) -> None:
        """Put the filled targets into the model; `absent`: targets that the checkpoint did not fill."""
        slots = {name: (module, key) for name, module, key in buffer_slots(self._model)}
        modules = dict(self._model.named_modules())
        for name in slots.keys() - self._wanted.keys():
            module, key = slots[name]
            del module._buffers[key]
        for name, form in self._wanted.items():
            module, key = slots.get(name) or (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            if key not in module._buffers:
                module.__dict__.pop(key, None)  # a plain attribute that the buffer has replaced
            module._buffers[key] = self._fill_buffer(form["same"] if isinstance(form, dict) else name, absent, form)

    def _fill_buffer(self, name: str, absent: Collection[str], form: Description) -> torch.Tensor | None:
        if form is None:
            return None
        key = f"{buffers_name(self._source)}{name}"
        if key not in self._targets:
            return self._targets[f"model/{name}"]
        if key in absent:
            self._targets[key].copy_(self._targets[f"{buffers_name(0)}{name}"])
        return self._targets[key]


def _describe(model: nn.Module) -> dict[str, Description]:
    found: dict[str, Description] = {}
    names: dict[int, str] = {}
    for name, module, key in buffer_slots(model):
        buffer = module._buffers[key]
        if buffer is None:
            found[name] = None
        elif id(buffer) in names:
            found[name] = {"same": names[id(buffer)]}
        else:
            names[id(buffer)] = name
            found[name] = tensor_metadata(buffer)
    return found
