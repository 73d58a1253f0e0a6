"""The ranks that save and restore together: object collectives on a gloo group of their own, none for a lone rank."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """All members call the same method in the same order; rank 0 of the group coordinates."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """Create the group; collective over the whole default group, so it belongs on the caller's main thread."""
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if not dist.is_available() or not dist.is_initialized():
            return
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        self._group = dist.new_group(members, backend="gloo")
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, found, group=self._group, group_dst=0)
        return found

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank 0 gives one value to each rank; the others pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if values is not None else None, group=self._group, group_src=0)
        return mine[0]

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            assert value is not None
            return value
        held: list[Any] = [value]
        dist.broadcast_object_list(held, group=self._group, group_src=0)
        return held[0]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
