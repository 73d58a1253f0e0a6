"""State of a model in addition to its parameters: buffers, extra state, modes and forms.

A restart rebuilds the model with its initial buffers. A save records every difference in the rank's facts, so that the
restart can allocate the right buffers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.parallel.apply.frozen_base import saved_parameters
from trainer.worker.saved_state import checkpoint_contents, object_state
from trainer.worker.saved_state.checkpoint_contents import buffer_slots, buffers_name, tensor_metadata, zeros
from trainer.worker.saved_state.object_state import UnsavableValue
from trainer.worker.workload import WorkloadError

_EXTRA = "_extra_state"


class ModelEntries:
    """Check for `state_dict()` entries that cannot be restored. It refuses any tensor, and plain values that change."""

    def __init__(self, model: nn.Module) -> None:
        """Record the entries of a new model. Raises WorkloadError for a tensor."""
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
                if _address(value) not in _addresses(model):  # otherwise it is a known tensor under another name
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
        return object_state.text(object_state.encode(value, name, {}, {}))
    except UnsavableValue:
        return f"{type(value)} {id(value)}"


def _error(name: str, what: str) -> WorkloadError:
    return WorkloadError(
        f"{name} in the model's state_dict() {what}, and is not a parameter, buffer or extra state of a module, so a "
        "restart could not restore it: use register_buffer(), or get_extra_state() and set_extra_state()"
    )


def extra_prefix(rank: int) -> str:
    """Return the key prefix for a rank's extra state, which may differ between ranks."""
    return f"extra/rank-{rank:05d}"


class ModuleExtraState:
    """Extra state of all modules in a model, keyed by module name."""

    def __init__(self, model: nn.Module) -> None:
        """Raise WorkloadError for a module with `get_extra_state` but without `set_extra_state`."""
        self._model = model
        for name, module in _with_state(model):
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise WorkloadError(
                    f"{name or 'the model'} ({type(module).__name__}) has get_extra_state() but no set_extra_state(), "
                    "so a restart could not restore it: add set_extra_state(state)"
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in _with_state(self._model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of every module. Raises WorkloadError unless exactly the same modules have extra state."""
        modules = dict(_with_state(self._model))
        for name in sorted(state.keys() ^ modules.keys()):
            where = "the checkpoint" if name in state else "the model"
            raise WorkloadError(
                f"only {where} has an extra state for module {name or 'the model itself'}: restore the original code"
            )
        for name, module in modules.items():
            module.set_extra_state(state[name])


def _with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


Flags = dict[str, bool]
_GRADIENTS, _TRAINING = "requires_grad", "training"


class ModuleModes:
    """The parameters' `requires_grad` and the modules' `training` flags, compared with a new model's flags."""

    def __init__(self, model: nn.Module) -> None:
        """Record the modes of a new model."""
        self._model = model
        self._built = {kind: _flags(model, kind) for kind in (_GRADIENTS, _TRAINING)}

    def facts(self) -> dict[str, Flags]:
        """Return the differences from a new model. A name with a trailing period covers a whole module."""
        found = {kind: _changes(built, _flags(self._model, kind)) for kind, built in self._built.items()}
        return {kind: flags for kind, flags in found.items() if flags}

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Set the modes from a checkpoint's facts. Return messages about names that the model does not have."""
        unknown = []
        for kind in self._built:
            flags, used = saved.get(kind, {}), set[str]()
            for name, each in _named_members(self._model, kind):
                entry = next((one for one in (*_enclosing_prefixes(name), name) if one in flags), None)
                if entry is not None:
                    used.add(entry)
                    setattr(each, kind, flags[entry])  # not `train()`, which changes inner modules too
            unknown += [f"the model has no {name}, whose {kind} had changed" for name in sorted(flags.keys() - used)]
        return unknown


def _named_members(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    found: Iterable[tuple[str, Any]] = model.named_parameters() if kind == _GRADIENTS else model.named_modules()
    return ((f"model.{name}" if name else "model", each) for name, each in found)


def _flags(model: nn.Module, kind: str) -> Flags:
    return {name: getattr(each, kind) for name, each in _named_members(model, kind)}


def _enclosing_prefixes(name: str) -> Iterator[str]:
    """Return the enclosing modules of a name, outermost first: `model.`, `model.layers.` and so on."""
    parts = name.split(".")
    return (".".join(parts[:count]) + "." for count in range(1, len(parts) + 1))


def _changes(built: Flags, now: Flags) -> Flags:
    """Return the values that have changed, with a single entry for a module whose values are all equal."""
    changed = [name for name, value in now.items() if name in built and built[name] != value]
    inside: dict[str, list[bool]] = {}
    for name, value in now.items() if changed else ():
        for whole in _enclosing_prefixes(name):
            inside.setdefault(whole, []).append(value)
    alike = {whole for whole, values in inside.items() if len(values) > 1 and len(set(values)) == 1}
    return {next((one for one in _enclosing_prefixes(name) if one in alike), name): now[name] for name in changed}


Description = list[Any] | dict[str, str] | None
"""Description of a buffer in JSON: its metadata, `{"same": NAME}` for a shared buffer, or None."""


def cannot_be_filled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor cannot be copied into, because its values share memory or are stored as conjugates."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if part.layout is not torch.strided or part.is_nested:
        return False
    if part.is_conj() or part.is_neg():
        return True
    return any(size > 1 and stride == 0 for size, stride in zip(part.shape, part.stride(), strict=True))


class SharedMemory:
    """Memory that tensors share in a new model but perhaps not at a later save, such as a target network's."""

    def __init__(self, model: nn.Module) -> None:
        """Record which parameters and buffers of a new model share memory."""
        self._model = model
        self._built = _sharing(model)

    def facts(self) -> list[list[list[str]]]:
        """Return the parts of each group that has split. A part lists the names of tensors that still share memory."""
        now = _sharing(self._model) if self._built else []
        found = []
        for built in self._built:
            still = [built & group for group in now if built & group]
            alone = built.difference(*still)
            if len(still) + len(alone) > 1:
                found.append([*map(sorted, still), *([name] for name in sorted(alone))])
        return found

    def restore(self, saved: Iterable[Sequence[Sequence[str]]]) -> None:
        """Give each part except the first its own memory, before a checkpoint fills it."""
        tensors = _plain_tensors(self._model)
        for parts in saved:
            whole = {name for part in parts for name in part}
            for part in parts[1:]:
                if any(group & set(part) and group & whole - set(part) for group in _sharing(self._model)):
                    _move([tensors[name] for name in part if name in tensors])


def _move(tensors: Iterable[torch.Tensor]) -> None:
    """Move these tensors to a copy of their memory. Tensors that share memory share the copy."""
    moved = dict[int, torch.UntypedStorage]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = storage.clone()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        own = moved[storage.data_ptr()]
        tensor.data = view.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())


def _sharing(model: nn.Module) -> list[set[str]]:
    places = []
    for name, tensor in _plain_tensors(model).items():
        steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        places.append((begin, begin + (steps + 1) * tensor.element_size(), name))
    groups, end = list[set[str]](), 0
    for begin, until, name in sorted(places):
        if begin >= end:
            groups.append(set())
        groups[-1].add(name)
        end = max(end, until)
    return [group for group in groups if len(group) > 1]


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    plain = {name: tensor for name, tensor in named if type(tensor) in (torch.Tensor, nn.Parameter)}
    return {
        name: tensor
        for name, tensor in plain.items()
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
    }


class BufferState:
    """Persistent buffers of one rank's model: their description in saves and their restoration."""

    def __init__(self, model: nn.Module, rank: int, device: torch.device) -> None:
        """Record the buffers of a newly built model."""
        self._model, self._rank, self._device = model, rank, device
        self._built = _describe(model)
        self._modules = {name for name, _ in model.named_modules()}
        self._alike = checkpoint_contents.alike_on_all_ranks(model)
        self._filled: dict[str, torch.Tensor] = {}
        self._wanted: dict[str, Description] = {}

    def facts(self) -> dict[str, Any]:
        """Return the differences from a new model as JSON. Raises WorkloadError for a buffer in a new module."""
        now = _describe(self._model)
        changed = {name: form for name, form in now.items() if name not in self._built or self._built[name] != form}
        for name, form in changed.items():
            if name.rpartition(".")[0] not in self._modules:
                raise WorkloadError(
                    f"buffer {name} is in a module that was created after build_model(), so a restart could not "
                    "restore it: create the module in build_model()"
                )
            if isinstance(form, list) and form[-1]:
                raise WorkloadError(
                    f"buffer {name} became a sharded tensor of shape {form[1]} after build_model(), so a restart "
                    "could not restore it: register it in build_model() with its final shape"
                )
        gone = sorted(self._built.keys() - now.keys())
        return {key: value for key, value in {"changed": changed, "gone": gone}.items() if value}

    def targets(self, states: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Allocate the buffers for a checkpoint with the facts `saved` and the ranks' `states`.

        A new rank in a larger world starts with rank 0's buffers.
        """
        self._wanted = self._describe_wanted(states[self._rank if self._rank < len(states) else 0])
        live = checkpoint_contents.persistent_buffers(self._model)
        self._filled = {
            name: self._allocate_buffer(name, form, live)
            for name, form in self._wanted.items()
            if isinstance(form, list)
        }
        # An imported checkpoint has the buffers of one rank.
        own = buffers_name(self._rank if self._rank < saved.get("ranks", 1) else 0)
        return {
            f"{'model/' if name in self._alike or isinstance(buffer, DTensor) else own}{name}": buffer
            for name, buffer in self._filled.items()
        }

    def _describe_wanted(self, state: Mapping[str, Any]) -> dict[str, Description]:
        facts = state.get("buffers", {})
        gone = set(facts.get("gone", ()))
        wanted = {name: form for name, form in self._built.items() if name not in gone}
        for name, form in facts.get("changed", {}).items():
            if name.rpartition(".")[0] not in self._modules:
                raise WorkloadError(
                    f"the checkpoint has buffer {name} in a module that the model does not have: restore the "
                    "original code"
                )
            wanted[name] = form
        return wanted

    def _allocate_buffer(self, name: str, form: list[Any], live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        there = live.get(name)
        if there is not None and tensor_metadata(there) == form and not cannot_be_filled(there):
            return there
        made = zeros(form, (there,), self._device)
        if made is None:
            raise WorkloadError(f"the checkpoint has buffer {name} {form}, which the model does not have")
        return made

    def restore(self) -> None:
        """Put the filled targets into the model."""
        slots = {name: (module, key) for name, module, key in buffer_slots(self._model)}
        modules = dict(self._model.named_modules())
        for name in slots.keys() - self._wanted.keys():
            module, key = slots[name]
            del module._buffers[key]
        for name, form in self._wanted.items():
            module, key = slots.get(name) or (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            if key not in module._buffers:
                module.__dict__.pop(key, None)  # a plain attribute, which the buffer replaces
            first = form["same"] if isinstance(form, dict) else name
            module._buffers[key] = None if form is None else self._filled[first]


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


class ParameterForms:
    """Names, shapes and types of the parameters of a new model."""

    def __init__(self, model: nn.Module) -> None:
        """Raise WorkloadError for a parameter that cannot be restored from a checkpoint."""
        self._model = model
        self._built = _forms(model)
        for name, parameter in model.named_parameters():
            if cannot_be_filled(parameter):
                raise WorkloadError(
                    f"several values of parameter {name} share one memory location (expand), or are stored as "
                    "conjugates, so it could not be restored: create it from value.clone()"
                )

    def refuse_changed(self) -> None:
        """Raise WorkloadError if the parameters have changed since the model was built."""
        now = _forms(self._model)
        if now == self._built:
            return
        for name in sorted(now.keys() | self._built.keys()):
            if name not in self._built:
                raise _form_error(f"parameter {name} was created after build_model()")
            if name not in now:
                raise _form_error(f"parameter {name} from build_model() is gone")
            if now[name] != self._built[name]:
                built, form = (f"torch.{dtype} of shape {shape}" for dtype, shape in (self._built[name], now[name]))
                raise _form_error(f"parameter {name} was {built} after build_model() and is {form} now")


def _form_error(what: str) -> WorkloadError:
    return WorkloadError(
        f"{what}, so a restart, which rebuilds the model, could not restore it: create all parameters in "
        "build_model() with their final shape and type"
    )


def _forms(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    forms = {name: tensor_metadata(parameter) for name, parameter in model.named_parameters()}
    return {name: (dtype, tuple(shape)) for name, (dtype, shape, *_) in forms.items()}


def nan_weights(model: nn.Module) -> frozenset[str]:
    """Return the keys of this rank's weights that contain NaN before training, such as uninitialized memory."""
    weights = {
        f"model/{name}": (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in saved_parameters(model)
        if parameter.is_floating_point() and parameter.numel()
    }
    return frozenset(key for key, weight in weights.items() if bool(torch.isnan(_widen(weight)).any()))


def _widen(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.itemsize > 1 else weight.to(torch.float32)  # 8-bit floats support few operations
