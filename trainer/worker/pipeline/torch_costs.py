"""What torch's pipelining does with every action for profilers and logs that are off: a twentieth of a small step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import _debug, _utils, schedules, stage


def leave_out_what_nobody_reads() -> None:
    """Replace four functions in torch's modules, once or more often; what they return where it is read is the same."""
    vars(schedules)["_get_profiler_function_name"] = _itself
    vars(schedules)["record_function"] = _named_for_profilers
    vars(stage)["flatten_args"] = _flatten_args
    vars(stage)["map_debug_info"] = _Shapes


_name_of = schedules._get_profiler_function_name
_NOTHING = nullcontext()


def _itself(action: schedules._Action) -> schedules._Action:
    return action


def _named_for_profilers(action: schedules._Action) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(_name_of(action)) if torch._C._autograd._profiler_enabled() else _NOTHING


def _flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Tensors in a tuple, or nothing, are flat: torch searches them for containers that it knows."""
    if not detach and (not args or (type(args) is tuple and all(isinstance(one, torch.Tensor) for one in args))):
        return list(args)
    return _utils.flatten_args(args, detach=detach)


class _Shapes:
    """Tensors of a message, described only where it is printed."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __str__(self) -> str:
        return str(_debug.map_debug_info(self._found))
