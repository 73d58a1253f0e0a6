"""Digests of a rank's parameters at a save and after the restore, which show whether all of them came back.

A framework may save the shards of one rank only, and restore without an error (accelerate issue 4206). An optimizer
knows the parameters that are trained, and its first step comes after the restore. Standard library, Python 3.9.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_WORDS = {1: "int8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}
"""Integer types keyed by the size of an element in bytes, as which its bits are added."""


_PAUSE = 100
"""Pause after the digests of a save, as a multiple of the time that they took."""


class RestoredState:
    """Optimizers of this process in the order of their first steps, and the digests expected of their parameters."""

    def __init__(self, expected: str, report: Callable[[bool], None]) -> None:
        """`expected` has a digest per optimizer, separated by `;`. `report` gets whether an optimizer's agree."""
        self._expected = expected.split(";") if expected else []
        self._report, self._compares = report, True
        self._described, self._step, self._not_before = "", -1, 0.0
        self._optimizers: list[weakref.ref[Any]] = []
        self._known: set[int] = set()

    def begin_training(self, resumes: bool) -> None:
        """Forget the optimizers of other models. The next ones have the expected parameters only if they resume."""
        self._optimizers.clear()
        self._known.clear()
        self._step, self._compares = -1, resumes

    def note(self, optimizer: Any) -> None:
        """Compare an optimizer's parameters before its first step."""
        if id(optimizer) in self._known:
            return
        self._known.add(id(optimizer))
        place = len(self._optimizers)
        self._optimizers.append(weakref.ref(optimizer))
        if self._compares and place < len(self._expected) and (found := digest(optimizer)):
            self._report(found == self._expected[place])

    def describe(self, step: int) -> str:
        """Return the number of ranks and the digests of all optimizers that have stepped: `4:12ab;34cd`.

        Return "" if an optimizer is gone or has parameters of an unknown kind, and for saves that follow each other so
        fast that digests would take more than a hundredth of the time. All files of one step have the same digests.
        """
        began = time.monotonic()
        if step != self._step:
            self._step, self._described = step, ""
            if began >= self._not_before:
                found = [digest(reference()) for reference in self._optimizers]
                self._described = f"{_world_size()}:{';'.join(found)}" if found and all(found) else ""
                self._not_before = began + _PAUSE * (time.monotonic() - began)
        return self._described


def _world_size() -> int:
    distributed = sys.modules["torch"].distributed
    is_one = not distributed.is_available() or not distributed.is_initialized()
    return 1 if is_one else int(distributed.get_world_size())


def digest(optimizer: Any) -> str:
    """Return the digest of the shards that this rank has of an optimizer's parameters, or "" if it has none."""
    try:
        return _digest(optimizer) if optimizer is not None else ""
    except Exception:  # noqa: BLE001  # outermost edge: parameters may be of any class
        return ""


def _digest(optimizer: Any) -> str:
    torch = sys.modules["torch"]
    with torch.no_grad():
        sums = [_add_bits(torch, tensor) for tensor in _tensors(optimizer)]
        # One transfer per device, because each one waits for all work of a GPU.
        values: dict[str, list[int]] = {}
        for device in dict.fromkeys(str(one.device) for one, _ in sums):
            values[device] = torch.stack([one for one, _ in sums if str(one.device) == device]).tolist()
    rows = [(size, values[str(one.device)].pop(0)) for one, size in sums]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] if rows else ""


def _tensors(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
            if local.layout == sys.modules["torch"].strided and local.device.type != "meta":
                yield local.detach()


def _add_bits(torch: Any, tensor: Any) -> tuple[Any, int]:
    """Return the sum of a tensor's words, which does not depend on their order, and the number of its elements."""
    words = tensor.contiguous().reshape(-1)
    if tensor.is_complex():
        words = torch.view_as_real(words).reshape(-1)
    return words.view(getattr(torch, _WORDS[words.element_size()])).sum(dtype=torch.int64), tensor.numel()


def expected_state(local_rank: int) -> str:
    """Return the digests that the agent expects of this rank, or "" if they are unknown."""
    states = os.environ.get("ORCH_RESUME_STATE", "").split(",")
    return states[local_rank] if local_rank < len(states) else ""
