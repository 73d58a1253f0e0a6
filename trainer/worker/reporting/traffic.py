"""Bytes sent in one step's collectives per mesh dimension, read once from the flight recorder."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from trainer.parallel.apply.mesh import Layout
from trainer.parallel.apply.pipeline_runtime import find_pipeline
from trainer.parallel.apply.sequence_part import find_shared_attention
from trainer.worker.reporting.stderr_best_effort import write_stderr

_SIZES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, RuntimeError)
"""Errors caused by the record formats of other torch versions. They must not end training."""
_MEASURED_STEP = 2
"""Number of the step within its generation. The first step includes setup that later steps do not repeat."""


class TrafficMeter:
    """Measures a generation's second step. The result holds for every step of the same shape."""

    def __init__(
        self, groups: Mapping[str, str], dumps: Sequence[Callable[[], str | bytes]] | None = None,
        unrecorded: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:  # fmt: skip
        """Create a meter. `groups` maps process group names to mesh dimensions. Other groups are not counted.

        `dumps` are the sources of records, by default torch's recorders of this rank. `unrecorded` returns, for each
        dimension, the total bytes sent so far in messages without a record.
        """
        self._groups, self._dumps = groups, _recorders() if dumps is None else dumps
        self._unrecorded = unrecorded or {}
        self._steps = 0
        self._marks: list[int] = []
        self._sent: Counter[str] = Counter()

    def step_ended(self) -> dict[str, int] | None:
        """End a step. Return the measurement after the second step (empty if records are lost), otherwise None."""
        self._steps += 1
        if self._steps > _MEASURED_STEP:
            return None
        try:
            return self._measure_bytes([_entries(dump()) for dump in self._dumps])
        except _UNREADABLE as error:
            write_stderr(f"orch: the bytes of a step's collectives are unknown: {type(error).__name__}: {error}")
            return {}

    def _measure_bytes(self, records: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, int] | None:
        if self._steps < _MEASURED_STEP:
            self._marks = [max((int(entry["record_id"]) for entry in entries), default=-1) for entries in records]
            self._sent = self._messages()
            return None
        total = self._messages() - self._sent
        for mark, entries in zip(self._marks, records, strict=True):
            if entries and int(entries[0]["record_id"]) > mark + 1:
                return {}
            total += self._bytes_by_dimension(entry for entry in entries if int(entry["record_id"]) > mark)
        return dict(total)

    def _messages(self) -> Counter[str]:
        return Counter({dimension: count() for dimension, count in self._unrecorded.items()})

    def _bytes_by_dimension(self, entries: Iterable[Mapping[str, Any]]) -> Counter[str]:
        found: Counter[str] = Counter()
        for entry in entries:
            dimension = self._groups.get(str(entry["process_group"][0]))
            # A message received by one rank was sent by another.
            if dimension and ":recv" not in str(entry.get("profiling_name", "")):
                found[dimension] += max(_bytes(entry, "input"), _bytes(entry, "output"))
        return found


def group_dimensions(layout: Layout) -> dict[str, str]:
    """Return the mesh dimension of each process group, keyed by group name. Torch's default group is `world`."""
    own = [
        *([layout.sequence_ranks] if layout.sequence_mesh else []),
        *([layout.expert_mesh] if layout.expert_mesh else []),
    ]
    found = {key: name for mesh in (*own, layout.mesh) for key, name in _mesh_dimensions(mesh).items()}
    world = dist.group.WORLD
    return found if world is None else {str(world.group_name): "world", **found}


def message_counters(model: nn.Module, device: torch.device) -> dict[str, Callable[[], int]]:
    """Return counters for bytes that gloo does not record: between stages and between ranks that share sequences."""
    if device.type != "cpu":
        return {}
    attention, pipeline = find_shared_attention(model), find_pipeline(model)
    found: dict[str, Callable[[], int]] = {}
    if pipeline is not None:
        found["pp"] = lambda: pipeline.sent_bytes
    if attention is not None:
        found[attention.dimension] = lambda: attention.sent_bytes
    return found


def _mesh_dimensions(mesh: DeviceMesh) -> dict[str, str]:
    groups: list[dist.ProcessGroup] = mesh.get_all_groups()
    names = mesh.mesh_dim_names or ()
    return {str(group.group_name): name for group, name in zip(groups, names, strict=True) if group.size() > 1}


def _recorders() -> list[Callable[[], str | bytes]]:
    nccl = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return [_dump_fr_trace_json] if nccl is None else [_dump_fr_trace_json, nccl]


def _entries(dump: str | bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dump).get("entries", [])
    return found


def _bytes(entry: Mapping[str, Any], side: str) -> int:
    tensors = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
    return sum(prod(map(int, sizes)) * _SIZES.get(str(dtype), 0) for sizes, dtype in tensors)
