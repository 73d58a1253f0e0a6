"""The ranks that save and restore together: objects exchanged over a gloo group of their own."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """All members call the same method in the same order; rank 0 of the group coordinates.

    torch's own object collectives are not used: they need NumPy, which orch does not.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, patience: timedelta | None = None) -> None:
        """Create the group; collective over the whole default group, so it belongs on the caller's main thread.

        `patience` is how long a member may keep the others waiting; by default as long as in the default group.
        """
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if not dist.is_available() or not dist.is_initialized():
            return
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        self._group = dist.new_group(members, backend="gloo", timeout=patience)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        data = pickle.dumps(value)
        sizes = self._sizes(len(data))
        mine, _ = _padded(data, max(sizes))
        received = [_room(max(sizes)) for _ in sizes] if self.leads else None
        dist.gather(mine, [tensor for tensor, _ in received] if received else None, group=self._group, group_dst=0)
        return _loaded(received, sizes) if received else None

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        data = pickle.dumps(value)
        sizes = self._sizes(len(data))
        mine, _ = _padded(data, max(sizes))
        received = [_room(max(sizes)) for _ in sizes]
        dist.all_gather([tensor for tensor, _ in received], mine, group=self._group)
        return _loaded(received, sizes)

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank 0 gives one value to each rank; the others pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        data = [pickle.dumps(value) for value in values] if values is not None else [b""] * self.size
        sizes = self._told([len(piece) for piece in data])
        pieces = [_padded(piece, max(sizes))[0] for piece in data] if self.leads else None
        tensor, room = _room(max(sizes))
        dist.scatter(tensor, pieces, group=self._group, group_src=0)
        return pickle.loads(room[: sizes[self.rank]])

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            assert value is not None
            return value
        data = pickle.dumps(value) if self.leads else b""
        (size,) = self._told([len(data)])
        tensor, room = _padded(data, size)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return pickle.loads(room)

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """The least of every rank's number, place by place, on every rank: 8 bytes for each on the wire."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def _sizes(self, mine: int) -> list[int]:
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([mine]), group=self._group)
        return [int(size) for size in found]

    def _told(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return [int(number) for number in tensor]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _room(size: int) -> tuple[Tensor, bytearray]:
    return _padded(b"", size)


def _padded(data: bytes, size: int) -> tuple[Tensor, bytearray]:
    """A tensor over `size` bytes that begin with `data`, and the same memory as a bytearray."""
    room = bytearray(data.ljust(size, b"\0"))
    return torch.frombuffer(room, dtype=torch.uint8), room


def _loaded(received: list[tuple[Tensor, bytearray]], sizes: list[int]) -> list[Any]:
    return [pickle.loads(room[:size]) for (_, room), size in zip(received, sizes, strict=True)]
