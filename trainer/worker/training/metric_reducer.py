"""Numbers of the workload's own, reduced over the ranks: three floats each, which travel with a sum over all ranks."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.worker.metric_values import Mean, Metric, Rank0, Sum
from trainer.worker.parallel.mesh import Layout
from trainer.worker.workload import WorkloadError

_CELLS = 3
"""Of a number: its sum, the weights that the sum is divided by, and how many ranks add to a plain sum."""


class MetricReducer:
    """Packs what a workload's method returns on this rank, and unpacks the sum over all ranks.

    The names of the first call, of all ranks together, are those of every later one.
    """

    def __init__(self, method: str, layout: Layout) -> None:
        """`method`: what the workload calls it, for messages."""
        self._method, self._layout = method, layout
        self._names: list[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the first call."""
        return tuple(self._names or ())

    def pack(self, values: Mapping[str, Metric]) -> torch.Tensor:
        """The row of float64 to be summed over the ranks; collective at the first call. Raises WorkloadError."""
        given = self._checked(values)
        if self._names is None:
            self._names = list(dict.fromkeys(name for names in _all_gather_json(list(given)) for name in names))
        new = [name for name in given if name not in self._names]
        if new:
            raise WorkloadError(
                f"{self._method}() returns {new[0]}, which it did not return the first time: return all names every "
                "time, with None for a number that is missing"
            )
        return self._tensor([cell for name in self._names for cell in self._row(given.get(name))])

    def unpack(self, numbers: list[float]) -> dict[str, float]:
        """The numbers by name, from the sums of all ranks' rows; names without a value are left out."""
        rows = zip(self.names, numbers[::_CELLS], numbers[1::_CELLS], numbers[2::_CELLS], strict=True)
        return {name: total if summed else total / weight for name, total, weight, summed in rows if summed or weight}

    def reduce(self, values: Mapping[str, Metric]) -> dict[str, float]:
        """All at once: collective, and waits for the device."""
        row = self.pack(values)
        if len(row):
            dist.all_reduce(row)
        return self.unpack(row.tolist())

    def _checked(self, values: Any) -> dict[str, Mean | Sum | Rank0 | None]:
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise WorkloadError(f"{self._method}() must return a dict of numbers by name")
        return {name: self._as_metric(name, value) for name, value in values.items()}

    def _as_metric(self, name: str, value: Any) -> Mean | Sum | Rank0 | None:
        made = value if isinstance(value, (Mean, Sum, Rank0)) or value is None else Mean(value)
        for number in () if made is None else vars(made).values():
            sound = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, (int, float))
            if not sound:
                raise WorkloadError(
                    f"{self._method}() returns {name}, which is no number and no tensor with one element"
                )
        return made

    def _row(self, value: Mean | Sum | Rank0 | None) -> tuple[Any, Any, float]:
        if value is None or (isinstance(value, Rank0) and self._layout.rank != 0):
            return 0.0, 0.0, 0.0
        if isinstance(value, Rank0):
            return _whole(value.value), 1.0, 0.0
        if isinstance(value, Sum):  # ranks that read the same data count it once
            return _whole(value.value) / self._layout.ranks_per_share, 0.0, 1.0
        weight = _whole(value.weight)
        # A mean over no samples is no number on this rank, and must be none of the sum.
        empty = isinstance(weight, float) and not weight
        return 0.0 if empty else _whole(value.value) * weight, weight, 0.0

    def _tensor(self, cells: list[Any]) -> torch.Tensor:
        """Without a wait for those that lie on the device."""
        plain = [0.0 if isinstance(cell, torch.Tensor) else float(cell) for cell in cells]
        row = torch.tensor(plain, dtype=torch.float64).to(self._layout.device, non_blocking=True)
        for at, cell in enumerate(cells):
            if isinstance(cell, torch.Tensor):
                row[at] = cell.reshape(())
        return row


def _whole(number: Any) -> Any:
    """A float, or a tensor of this rank without gradients."""
    if not isinstance(number, torch.Tensor):
        return float(number)
    number = number.full_tensor() if isinstance(number, DTensor) else number
    return number.detach().double()


def _all_gather_json(value: Any) -> list[Any]:
    """The value of every rank, in their order; plain JSON, so that no rank runs what another one sends."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[: int(length)].tolist())) for part, length in zip(parts, lengths, strict=True)]
