"""A value of any type in a comparable form, so that a change in place is seen. Never read back."""

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.worker.saved_state import nested_state
from trainer.worker.saved_state.nested_state import Names

_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module, DeviceMesh)
"""Types of values of which only matters which one it is."""
_GROUPS = (dist.ProcessGroup,) if dist.is_available() else ()
_PLAIN = (type(None), bool, int, str, float, complex)


def comparable(
    value: Any, path: str, tensors: dict[str, torch.Tensor], names: Names, above: tuple[int, ...] = ()
) -> Any:
    """What copying would take of `value`, in JSON; its tensors are added to `tensors`. Raises TypeError for some."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return nested_state.encode(value, path, tensors, names)
    if isinstance(value, types.MethodType):
        return [id(value.__func__), id(value.__self__)]
    if isinstance(value, (*_BY_IDENTITY, *_GROUPS, torch.optim.Optimizer)):
        return id(value)
    if isinstance(value, bytes):
        return value.hex()
    if id(value) in above:
        return {"above": above.index(id(value))}
    parts = list(value) if type(value) in (list, tuple) else _parts(value)
    return [comparable(part, f"{path}:{at}", tensors, names, (*above, id(value))) for at, part in enumerate(parts)]


def _parts(value: Any) -> list[object]:
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return [reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
