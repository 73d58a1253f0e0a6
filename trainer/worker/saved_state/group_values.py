"""Values of optimizer parameter groups that training changes, as opposed to settings.

A value set by `build_optimizer` belongs to the configuration. It is not saved, and a restart uses the value from its
own configuration. A value that training has changed is state, which is saved and restored. `lr` belongs to the
schedule, which sets it before every step.
"""

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from checkpointing.storage.digests import digest
from trainer.worker.saved_state import object_state
from trainer.worker.saved_state.object_state import Names, UnsavableValue
from trainer.worker.workload import WorkloadError

_NOT_STATE = ("params", "lr")
_SCALARS = (type(None), bool, int, float, str)
_ID_LENGTH = 16
_MISSING = object()
_NO_COPY = (TypeError, AttributeError, ValueError, RuntimeError)
"""Exceptions raised for values that cannot be copied."""
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module, DeviceMesh)
"""Types whose values are compared by identity."""
_GROUPS = (dist.ProcessGroup,) if dist.is_available() else ()
_COMPARED = (*_SCALARS, complex)


@dataclass(frozen=True)
class _InitialValue:
    """Copy of a value from `build_optimizer`. `text` is None for types that are not saved."""

    value: Any
    text: str | None
    tensors: Mapping[str, torch.Tensor]
    itself: Any = None
    """The original value, for a type that is not saved."""
    held: str | None = None
    """The initial contents as text, for a type that is not saved; None if unknown."""

    def equals_scalar(self, value: Any) -> bool:
        return type(value) in _SCALARS and type(value) is type(self.value) and bool(value == self.value)

    def is_unchanged(self, text: str | None, tensors: Mapping[str, torch.Tensor]) -> bool:
        if text != (self.held if self.text is None else self.text):
            return False
        return all(_same(tensor, self.tensors[path]) for path, tensor in tensors.items())


class GroupValues:
    """Values in the groups of one optimizer. Groups are identified by the names of their parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        """Record the current values in the groups as the configured values."""
        self._optimizer, self._names = optimizer, names
        self._not_copied = {id(parameter): parameter for parameter in names}
        members = [sorted(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups]
        self._ids = list(_identities(members))
        self._described = [
            {"members": own, "count": len(found), "first": found[0] if found else ""}
            for own, found in zip(self._ids, members, strict=True)
        ]
        self._initial = [
            {key: self._record_initial(number, key, group[key]) for key in _keys(group)}
            for number, group in enumerate(optimizer.param_groups)
        ]
        self.unsaved: dict[str, str] = {}
        """Descriptions of changed values whose type is not saved, under their keys."""

    def refuse_other_groups(self) -> None:
        """Raise WorkloadError if the number of groups has changed since `build_optimizer`."""
        now, built = len(self._optimizer.param_groups), len(self._ids)
        if now != built:
            raise WorkloadError(
                f"{type(self._optimizer).__name__} has {now} parameter groups, but build_optimizer created {built}: a "
                "restart could not reproduce the difference. Create all groups in build_optimizer, and give those that "
                "train later a learning rate of 0 until then (their `lr_scale`, or `lr` with a scheduler of your "
                "own)"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor in the groups, including settings, so that all saves have the same form."""
        self.refuse_other_groups()
        found: dict[str, torch.Tensor] = {}
        for number, key, value in self._all():
            if type(value) not in _SCALARS:
                self._encode_value(number, key, value, found)
        return found

    def changed_values(self) -> list[dict[str, Any]]:
        """Return the groups with changed values as JSON, with the text of each configured value."""
        values: dict[int, dict[str, Any]] = {}
        for number, key, value in self._all():
            initial = self._initial[number].get(key)
            # Check the common case first, because there may be a group for every parameter.
            if initial is not None and initial.equals_scalar(value):
                continue
            saved = self._encode_change(number, key, value, initial)
            if saved is not None:
                values.setdefault(number, {})[key] = saved
        return [{**self._described[number], "values": found} for number, found in values.items()]

    def _encode_change(self, number: int, key: str, value: Any, initial: _InitialValue | None) -> dict[str, Any] | None:
        held: dict[str, torch.Tensor] = {}
        encoded = self._encode_value(number, key, value, held)
        if encoded is None:
            return None
        if initial is None:
            return {"value": encoded[0]}
        if initial.is_unchanged(object_state.text(encoded[0]), held):
            return None
        return {"value": encoded[0], "given": initial.text}

    def _encode_value(self, number: int, key: str, value: Any, held: dict[str, torch.Tensor]) -> tuple[Any] | None:
        """Return the value's JSON, or None if it cannot be saved, which is recorded if the value has changed."""
        try:
            return (object_state.encode(value, self._path(number, key), held, self._names),)
        except UnsavableValue:
            if not self._is_untouched(value, self._initial[number].get(key)):
                self.unsaved[key] = f"{key} of the parameter groups (a {type(value).__name__})"
            return None

    def _record_initial(self, number: int, key: str, value: Any) -> _InitialValue:
        held: dict[str, torch.Tensor] = {}
        try:
            encoded = object_state.encode(value, self._path(number, key), held, self._names)
        except UnsavableValue:
            return self._record_unsavable(value)
        return _InitialValue(self._copy(value), object_state.text(encoded), _clone_tensors(held))

    def _record_unsavable(self, value: Any) -> _InitialValue:
        text, tensors = self._comparable(value)
        if text is None or self._comparable(value)[0] != text:
            return _InitialValue(value, None, {}, value)
        try:
            return _InitialValue(self._copy(value), None, _clone_tensors(tensors), value, text)
        except _NO_COPY:
            return _InitialValue(value, None, {}, value)

    def _comparable(self, value: Any) -> tuple[str | None, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        try:
            return object_state.text(_comparable_json(value, "", tensors, self._names)), tensors
        except _NO_COPY:
            return None, {}

    def _is_untouched(self, value: Any, initial: _InitialValue | None) -> bool:
        """Return whether a value of an unsaved type still has its initial contents. Unknown counts as no."""
        if initial is None or initial.text is not None or initial.held is None:
            return False
        return initial.is_unchanged(*self._comparable(value))

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._not_copied))

    def _path(self, number: int, key: str) -> str:
        return f"groups/{self._ids[number]}/{object_state.path_part(key)}"

    def _all(self) -> Iterator[tuple[int, str, Any]]:
        for number, group in enumerate(self._optimizer.param_groups):
            yield from ((number, key, group[key]) for key in _keys(group))

    # ---- restoring

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise WorkloadError if a saved group has different parameters in this optimizer."""
        for group in saved:
            if group["members"] not in self._ids:
                keys = ", ".join(sorted(group["values"])[:4])
                raise WorkloadError(
                    f"the checkpoint has values ({keys}) of a parameter group of {group['count']} parameters, the "
                    f"first of which is {group['first']}, but the optimizer has no group with these parameters: build "
                    "the groups as before, or start from the weights alone: "
                    "`orch ckpt import DIR CONFIG --weights-only`"
                )

    def reset(self) -> None:
        """Restore the configured values, except `lr`."""
        self.unsaved.clear()  # priming may have changed something
        copies: dict[int, Any] = {}
        for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
            for key in [key for key in _keys(group) if key not in initial]:
                del group[key]
            for key, first in initial.items():
                if first.text is not None:
                    _set_value(group, key, self._copy(first.value))
                elif group.get(key, _MISSING) is not first.itself or not self._is_untouched(first.itself, first):
                    # Groups that share a value share its copy.
                    copies.setdefault(id(first.itself), first.value if first.held is None else self._copy(first.value))
                    group[key] = copies[id(first.itself)]

    def restore(self, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore the configured values, then the saved values. Return messages about overridden settings."""
        self.reset()
        parameters = {name: parameter for parameter, name in self._names.items()}
        overruled: dict[str, str] = {}
        for group in saved:
            number = self._ids.index(group["members"])
            for key, value in group["values"].items():
                initial = self._initial[number].get(key)
                if "given" in value and initial is not None and value["given"] != initial.text:
                    overruled[key] = f"{key} is now given as {initial.text}, but the value set by training is kept"
                _set_value(
                    self._optimizer.param_groups[number], key, object_state.decode(value["value"], tensors, parameters)
                )
        return list(overruled.values())


def _clone_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {path: tensor.clone() for path, tensor in tensors.items()}


def _keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key not in _NOT_STATE]


def _set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value. Fill an existing tensor in place, because other objects, such as a compiled step, may hold it."""
    there = group.get(key)
    if (
        isinstance(there, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and _shape_and_type(there) == _shape_and_type(value)
    ):
        with torch.no_grad():
            there.copy_(value)
    else:
        group[key] = value


def _shape_and_type(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tuple(tensor.shape)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _shape_and_type(one) == _shape_and_type(other) and bool(torch.equal(one, other))


def _identities(groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a digest of each group's parameter names. Empty groups are numbered."""
    empty = 0
    for members in groups:
        empty += not members
        yield digest("\n".join(members or [f"#{empty}"]).encode())[:_ID_LENGTH]


def _comparable_json(
    value: Any, path: str, tensors: dict[str, torch.Tensor], names: Names, above: tuple[int, ...] = ()
) -> Any:
    """Return any value as JSON, only to detect in-place changes. Raises TypeError for some types."""
    if isinstance(value, torch.Tensor) or type(value) in _COMPARED:
        return object_state.encode(value, path, tensors, names)
    if isinstance(value, types.MethodType):
        return [id(value.__func__), id(value.__self__)]
    if isinstance(value, (*_BY_IDENTITY, *_GROUPS, torch.optim.Optimizer)):
        return id(value)
    if isinstance(value, bytes):
        return value.hex()
    if id(value) in above:
        return {"above": above.index(id(value))}
    parts, above = list(value) if type(value) in (list, tuple) else _parts(value), (*above, id(value))
    return [_comparable_json(part, f"{path}:{at}", tensors, names, above) for at, part in enumerate(parts)]


def _parts(value: Any) -> list[object]:
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
