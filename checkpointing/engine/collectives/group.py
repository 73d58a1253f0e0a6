"""Collectives for the ranks that save and restore together, with failures as values.

gloo treats any process that connects as a peer. Every message therefore carries an HMAC, made with the generation's
key, of the group, exchange number, sender, receiver and contents. A message that no rank of this generation sent in
this exchange is rejected before it is parsed.
"""

import errno
import hmac
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pickle import PickleError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.errors import (
    CheckpointError,
    CheckpointRefused,
    FencedOff,
    SaveFailed,
    UnsavableState,
    Unsound,
)
from checkpointing.message_codec import decode, encode, peer_message
from checkpointing.storage.storage_errors import FULL


def start_background_thread(act: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread in which torch uses a single core, leaving the others to training."""
    mine, settled = torch.get_num_threads(), threading.Event()

    def run() -> None:
        torch.set_num_threads(1)
        settled.set()
        act()

    # A daemon thread, so that a rank that must exit does not wait for peers that are already gone.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    settled.wait()
    # The setting is per thread, but new threads start with the most recently set value.
    torch.set_num_threads(mine)
    return thread


T = TypeVar("T")
F = TypeVar("F")

# Everything that reading, writing, torch and our own code may raise. A rank that fails in a collective operation must
# tell its peers, which would otherwise wait for it. CheckpointException is a BaseException, so it must be listed.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    CheckpointError,
    CheckpointException,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    PickleError,
    RuntimeError,
    TypeError,
    ValueError,
)

_PASSING = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Disk, memory and device errors that may not recur at a later save."""

_NAMED_RANKS = 2
"""Number of ranks whose failures are reported individually, because a full disk is full for all of them."""


def explain(error: BaseException) -> str:
    """Return a one-line description of the error, which says so if the disk is full."""
    if isinstance(error, (CheckpointRefused, SaveFailed)):
        return error.reason
    if isinstance(error, OSError):
        return f"disk full ({error})" if error.errno in FULL else str(error) or type(error).__name__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


@peer_message
@dataclass(frozen=True)
class Failed:
    """A failure that a rank sends instead of its result.

    `final`: a retry cannot help. `lasting`: no later save can help either, because the user's program or orch would
    fail in the same way. `stuck`: an access did not return. `damaged`: the source of a copy is damaged.
    """

    reason: str
    fenced: bool = False
    final: bool = False
    lasting: bool = False
    stuck: bool = False
    damaged: bool = False

    @classmethod
    def from_error(cls, error: BaseException) -> "Failed":
        lasting = isinstance(error, UnsavableState) or not isinstance(error, (*_PASSING, CheckpointError))
        return cls(
            explain(error),
            fenced=isinstance(error, FencedOff),
            final=isinstance(error, Unsound) or lasting,
            lasting=lasting,
            stuck=isinstance(error, OSError) and error.errno == errno.ETIMEDOUT,
        )

    @classmethod
    def combine(cls, results: Sequence[object]) -> "Failed | None":
        """Combine the failures in all ranks' results into one; return None if no rank failed."""
        failed = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Failed)]
        if not failed:
            return None
        reasons = [f"rank {rank}: {result.reason}" for rank, result in failed[:_NAMED_RANKS]]
        if len(failed) > len(reasons):
            reasons.append(f"and {len(failed) - len(reasons)} more rank(s)")
        flags = ("fenced", "final", "lasting", "stuck", "damaged")
        return cls("; ".join(reasons), *(any(getattr(result, flag) for _, result in failed) for flag in flags))

    def error(self, step: int) -> SaveFailed:
        """Return the exception to raise on every rank."""
        if self.fenced:
            return FencedOff(step, self.reason)
        if self.lasting:
            return UnsavableState(step, self.reason)
        return Unsound(step, self.reason) if self.final else SaveFailed(step, self.reason)


def result_or(act: Callable[[], T], failed: Callable[[BaseException], F]) -> T | F:
    """Return the result of `act`, or `failed(error)` if it fails, so that peers are not left waiting."""
    try:
        return act()
    except FAILURES as error:
        return failed(error)


def result_or_failed(act: Callable[[], T]) -> T | Failed:
    """Return the result of `act`, or its error as a Failed."""
    return result_or(act, Failed.from_error)


_TAG = 32
_ALL = -1


class UnauthenticatedPeer(RuntimeError):
    """A message that no rank of this generation sent; its contents were not parsed."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"the message received for rank {rank} is not authenticated with this generation's key: another program "
            f"has connected to the ports of this job's ranks. See docs/security.md to restrict access to that network"
        )


class RankGroup:
    """Collectives of a group; all members call the same method in the same order, and rank 0 coordinates.

    torch's own object collectives are not used, because they unpickle what peers send.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        patience: timedelta | None = None,
        *,
        key: bytes = b"",
        leads_node: bool = True,
    ) -> None:
        """Create the group. Collective over the whole default group, so it must be called on the caller's main thread.

        `patience` is how long a member may keep the others waiting (by default, as long as in the default group). `key`
        is known only to the ranks of this generation; an empty key provides no authentication. `leads_node` means that
        this rank manages its node's disks.
        """
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size, self._leads_node = 0, 1, leads_node
        self._key, self._name, self._exchanges = key, "", 0
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return  # a single rank has no peers
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        self._group = dist.new_group(members, backend="gloo", timeout=patience)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._name = self._group.group_name

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def looks_after(self, *, shared: bool) -> bool:
        """Return whether this rank seals and deletes in a tier: rank 0 in a shared tier, else one rank per node."""
        return self.leads if shared else self._leads_node

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        data = self._next_message(value, to=0)
        sizes = self._sizes(len(data))
        mine, _ = _padded_buffer(data, max(sizes))
        received = [_padded_buffer(b"", max(sizes)) for _ in sizes] if self.leads else None
        dist.gather(mine, [tensor for tensor, _ in received] if received else None, group=self._group, group_dst=0)
        return self._verify_all(received, sizes, to=0) if received else None

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        data = self._next_message(value, to=_ALL)
        sizes = self._sizes(len(data))
        mine, _ = _padded_buffer(data, max(sizes))
        received = [_padded_buffer(b"", max(sizes)) for _ in sizes]
        dist.all_gather([tensor for tensor, _ in received], mine, group=self._group)
        return self._verify_all(received, sizes, to=_ALL)

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return the value that rank 0 has for this rank. Rank 0 passes one value per rank; the others pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        self._exchanges += 1
        data = [self._sign(value, to) for to, value in enumerate(values)] if values is not None else []
        sizes = self._broadcast_numbers([len(piece) for piece in data] or [0] * self.size)
        pieces = [_padded_buffer(piece, max(sizes))[0] for piece in data] if self.leads else None
        tensor, room = _padded_buffer(b"", max(sizes))
        dist.scatter(tensor, pieces, group=self._group, group_src=0)
        mine: T = self._verify(room[: sizes[self.rank]], sender=0, to=self.rank)
        return mine

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank, with the same type as on rank 0."""
        if self.size == 1:
            assert value is not None
            return value
        self._exchanges += 1
        data = self._sign(value, to=_ALL) if self.leads else b""
        (size,) = self._broadcast_numbers([len(data)])
        tensor, room = _padded_buffer(data, size)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return self._verify(room, sender=0, to=_ALL)

    def from_leader(self, act: Callable[[], T]) -> T | Failed:
        """Call `act` on rank 0 only; return its result or failure on every rank."""
        found: T | Failed = self.broadcast(result_or_failed(act) if self.leads else None)
        return found

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks, on every rank.

        Each number takes 8 bytes and is not authenticated.
        """
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]

    # ---- messages

    def _next_message(self, value: Any, to: int) -> bytes:
        """Start the next exchange and return this rank's message for it."""
        self._exchanges += 1
        return self._sign(value, to)

    def _sign(self, value: Any, to: int) -> bytes:
        data = encode(value)
        return self._tag(data, self.rank, to) + data

    def _verify(self, message: bytearray, sender: int, to: int) -> Any:
        tag, data = bytes(message[:_TAG]), bytes(message[_TAG:])
        if not hmac.compare_digest(tag, self._tag(data, sender, to)):
            raise UnauthenticatedPeer(sender)
        return decode(data)

    def _verify_all(self, received: Sequence[tuple[Tensor, bytearray]], sizes: Sequence[int], to: int) -> list[Any]:
        messages = zip(received, sizes, strict=True)
        return [self._verify(room[:size], sender, to) for sender, ((_, room), size) in enumerate(messages)]

    def _tag(self, data: bytes, sender: int, to: int) -> bytes:
        place = f"{self._name}\n{self._exchanges}\n{sender}\n{to}\n".encode()
        return hmac.digest(self._key, place + data, "sha256")

    def _sizes(self, mine: int) -> list[int]:
        found = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([mine], device="cpu"), group=self._group)
        return [int(size) for size in found]

    def _broadcast_numbers(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, device="cpu")
        dist.broadcast(tensor, group=self._group, group_src=0)
        return [int(number) for number in tensor]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one generation. `facts` about them (the mesh sizes) are recorded in every manifest.

    `key` authenticates the ranks to each other. `leads_node` means that this rank manages its node's disks.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    process_group: dist.ProcessGroup | None = None
    key: bytes = b""
    leads_node: bool = True

    def group(self, patience: timedelta | None = None) -> RankGroup:
        """Create a new group of all ranks. Collective; see `RankGroup`."""
        return RankGroup(self.process_group, patience, key=self.key, leads_node=self.leads_node)


def _padded_buffer(data: bytes, size: int) -> tuple[Tensor, bytearray]:
    """Return a tensor of `size` bytes that begins with `data`, and the same memory as a bytearray."""
    room = bytearray(data.ljust(size, b"\0"))
    return torch.frombuffer(room, dtype=torch.uint8), room
