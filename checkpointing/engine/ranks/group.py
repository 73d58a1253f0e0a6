"""The ranks that save and restore together: values exchanged over a gloo group of their own, authenticated.

gloo treats any process that connects as a peer. Every message therefore carries an HMAC of the generation's key, over
the group, the number of the exchange, sender, receiver and contents: what no rank of this generation sent in this
exchange is refused before it is parsed.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.engine.ranks.peer_codec import decode, encode

T = TypeVar("T")

_TAG = 32
_ALL = -1


class UnauthenticatedPeer(RuntimeError):
    """A message that no rank of this generation has sent; what it says was not looked at."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"a message in the place of rank {rank} is not authenticated by this generation's key: another program has "
            f"connected to the ports of this job's ranks. docs/security.md says how to keep others off that network"
        )


class RankGroup:
    """All members call the same method in the same order; rank 0 of the group coordinates.

    torch's own object collectives are not used: they unpickle what peers send.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        patience: timedelta | None = None,
        *,
        key: bytes = b"",
        leads_node: bool = True,
    ) -> None:
        """Create the group; collective over the whole default group, so it belongs on the caller's main thread.

        `patience` is how long a member may keep the others waiting; by default as long as in the default group.
        `key` is known to the ranks of this generation alone; an empty one authenticates nobody. `leads_node`: this rank
        looks after the disks of its own node.
        """
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size, self._leads_node = 0, 1, leads_node
        self._key, self._name, self._exchanges = key, "", 0
        if not dist.is_available() or not dist.is_initialized():
            return
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        self._group = dist.new_group(members, backend="gloo", timeout=patience)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._name = self._group.group_name

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def looks_after(self, *, shared: bool) -> bool:
        """Whether this rank seals and deletes in a tier: rank 0 in a shared one, one rank of each node elsewhere."""
        return self.leads if shared else self._leads_node

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        data = self._next_message(value, to=0)
        sizes = self._sizes(len(data))
        mine, _ = _padded(data, max(sizes))
        received = [_room(max(sizes)) for _ in sizes] if self.leads else None
        dist.gather(mine, [tensor for tensor, _ in received] if received else None, group=self._group, group_dst=0)
        return self._all_opened(received, sizes, to=0) if received else None

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        data = self._next_message(value, to=_ALL)
        sizes = self._sizes(len(data))
        mine, _ = _padded(data, max(sizes))
        received = [_room(max(sizes)) for _ in sizes]
        dist.all_gather([tensor for tensor, _ in received], mine, group=self._group)
        return self._all_opened(received, sizes, to=_ALL)

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank 0 gives one value to each rank; the others pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        self._exchanges += 1
        data = [self._sealed(value, to) for to, value in enumerate(values)] if values is not None else []
        sizes = self._broadcast_numbers([len(piece) for piece in data] or [0] * self.size)
        pieces = [_padded(piece, max(sizes))[0] for piece in data] if self.leads else None
        tensor, room = _room(max(sizes))
        dist.scatter(tensor, pieces, group=self._group, group_src=0)
        mine: T = self._opened(room[: sizes[self.rank]], sender=0, to=self.rank)
        return mine

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank, in whatever type rank 0 has sent it."""
        if self.size == 1:
            assert value is not None
            return value
        data = self._next_message(value, to=_ALL) if self.leads else self._nothing()
        (size,) = self._broadcast_numbers([len(data)])
        tensor, room = _padded(data, size)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return self._opened(room, sender=0, to=_ALL)

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """The least of every rank's number, place by place, on every rank: 8 bytes each, not authenticated."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]

    # ---- messages

    def _next_message(self, value: Any, to: int) -> bytes:
        """Begin the next exchange; this rank's message in it."""
        self._exchanges += 1
        return self._sealed(value, to)

    def _nothing(self) -> bytes:
        self._exchanges += 1
        return b""

    def _sealed(self, value: Any, to: int) -> bytes:
        data = encode(value)
        return self._tag(data, self.rank, to) + data

    def _opened(self, message: bytearray, sender: int, to: int) -> Any:
        tag, data = bytes(message[:_TAG]), bytes(message[_TAG:])
        if not hmac.compare_digest(tag, self._tag(data, sender, to)):
            raise UnauthenticatedPeer(sender)
        return decode(data)

    def _all_opened(self, received: Sequence[tuple[Tensor, bytearray]], sizes: Sequence[int], to: int) -> list[Any]:
        messages = zip(received, sizes, strict=True)
        return [self._opened(room[:size], sender, to) for sender, ((_, room), size) in enumerate(messages)]

    def _tag(self, data: bytes, sender: int, to: int) -> bytes:
        place = f"{self._name}\n{self._exchanges}\n{sender}\n{to}\n".encode()
        return hmac.digest(self._key, place + data, "sha256")

    def _sizes(self, mine: int) -> list[int]:
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([mine]), group=self._group)
        return [int(size) for size in found]

    def _broadcast_numbers(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return [int(number) for number in tensor]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one generation; `facts` about them (sizes of the mesh) stand in every manifest.

    `key` authenticates the ranks to each other; `leads_node`: this rank looks after the disks of its own node.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    process_group: dist.ProcessGroup | None = None
    key: bytes = b""
    leads_node: bool = True

    def group(self, patience: timedelta | None = None) -> RankGroup:
        """A new group of all of them; collective, see `RankGroup`."""
        return RankGroup(self.process_group, patience, key=self.key, leads_node=self.leads_node)


def _room(size: int) -> tuple[Tensor, bytearray]:
    return _padded(b"", size)


def _padded(data: bytes, size: int) -> tuple[Tensor, bytearray]:
    """A tensor over `size` bytes that begin with `data`, and the same memory as a bytearray."""
    room = bytearray(data.ljust(size, b"\0"))
    return torch.frombuffer(room, dtype=torch.uint8), room
