"""Comparison of all ranks' figures every EVERY steps: minimum, median, maximum, and the maximum's rank."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

EVERY = 50
"""Steps between two comparisons; each is one all-gather of a few numbers in host memory."""
Gather = Callable[[Sequence[float]], list[list[float]]]


class RankComparison:
    """Comparison of this rank's figures, averaged over EVERY steps, with those of all ranks; collective."""

    def __init__(self, gather: Gather | None = None) -> None:
        """`gather` returns the rows of all ranks in order; None: over torch's default group."""
        self._gather = gather or _all_gather
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, step: int, seconds: Mapping[str, float], memory: Mapping[str, int]) -> dict[str, Any]:
        """Add a step; all ranks add the same steps with the same names. Empty except at every EVERYth step of the run.

        `seconds` are averaged, `memory` are peaks in bytes.
        """
        for name, value in seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        if step % EVERY:
            return {}
        own = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        names = [*own, *memory]
        rows = self._gather([*own.values(), *map(float, memory.values())])
        return {name: _summarize([row[at] for row in rows]) for at, name in enumerate(names)}


def _summarize(values: Sequence[float]) -> dict[str, Any]:
    most = max(values)
    return {
        "least": round(min(values), 6), "median": round(median(values), 6), "most": round(most, 6),
        "rank": values.index(most),
    }  # fmt: skip


def _all_gather(row: Sequence[float]) -> list[list[float]]:
    mine = torch.tensor(row, dtype=torch.float64, device="cpu")
    rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [each.tolist() for each in rows]
