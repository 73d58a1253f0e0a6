"""The arena: a rank's memfd, which holds copies of its state and a record of each copy's contents.

Layout: a page with the shape, then alternating *record* areas and buffers, all page-aligned. Both the rank and the
writer process map it. A record is valid only if it is complete and belongs to the arena's plan.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from secrets import token_hex
from typing import Any

import xxhash

from checkpointing.format.manifest import FileEntry
from checkpointing.message_codec import decode, encode, peer_message
from checkpointing.storage import shared_memory
from checkpointing.storage.digests import CHUNK
from checkpointing.storage.shared_memory import PAGE, whole_pages

_SHAPE_MARK, _RECORD_MARK = b"orchare1", b"orchrec1"
_SEAL = struct.Struct("<8sQ16s")  # mark, length of the payload, xxh3-128 of the payload
_DIGEST_ROOM = 40  # a chunk's digest as JSON
_FILE_ROOM = 512  # a file's name, its sizes and the digest of a shorter last chunk
_MOST_FILES = 64


@peer_message
@dataclass(frozen=True, kw_only=True)
class BufferRecord:
    """A buffer's contents: one rank's files at one step, with their digests and their offsets in the buffer."""

    step: int
    plan: str
    name: str
    extra: dict[str, Any] = field(default_factory=dict)
    files: tuple[FileEntry, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _ArenaShape:
    """An arena's shape. `stamp` is unique to this shape."""

    plan: str = ""
    buffer_bytes: int = 0
    buffers: int = 0
    record_bytes: int = 0
    stamp: str = ""

    def record_offset(self, index: int) -> int:
        return PAGE + index * (self.record_bytes + self.buffer_bytes)

    def buffer_offset(self, index: int) -> int:
        return self.record_offset(index) + self.record_bytes

    @property
    def size(self) -> int:
        return self.record_offset(self.buffers)


class Arena:
    """One side's view of the memory behind `descriptor`, which it owns. Views of the memory keep it mapped.

    WARNING: reshape it only while no order for it is in flight, because reshaping changes the data being read.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._shape, self._memory = _ArenaShape(), memoryview(b"")
        self.reload()

    @classmethod
    def create(cls, name: str = "orch-arena") -> "Arena":
        """Create a new memory file without a shape. It appears in no folder and is freed with its last descriptor."""
        return cls(os.memfd_create(name, os.MFD_CLOEXEC))

    @property
    def plan(self) -> str:
        """Hash of the plan that the buffers are laid out for; empty if there is no shape."""
        return self._shape.plan

    @property
    def buffer_bytes(self) -> int:
        return self._shape.buffer_bytes

    @property
    def buffers(self) -> int:
        return self._shape.buffers

    @property
    def stamp(self) -> str:
        """Identifier of this shape. The other side remaps the memory when it receives a different one."""
        return self._shape.stamp

    def shape(self, buffer_bytes: int, buffers: int, plan: str, extra_room: int = 0) -> None:
        """Create new zeroed buffers without records. Raises OSError if there is not enough memory.

        A record has room for `extra_room` bytes of the caller's own facts. `buffer_bytes` is rounded up to whole pages.
        """
        assert plan, "an arena without a plan has no shape"
        whole = whole_pages(buffer_bytes)
        room = _SEAL.size + PAGE + extra_room + _MOST_FILES * _FILE_ROOM + -(-whole // CHUNK) * _DIGEST_ROOM
        shape = _ArenaShape(
            plan=plan, buffer_bytes=whole, buffers=buffers, record_bytes=whole_pages(room), stamp=token_hex()
        )
        self._forget()
        shared_memory.reserve(self.descriptor, shape.size)
        self._map(shape)
        shared_memory.populate(self._memory)
        _seal(self._memory[:PAGE], _SHAPE_MARK, json.dumps(asdict(shape)).encode())

    def _forget(self) -> None:
        """Release all pages. The file never shrinks, because accessing it past its end would kill the other side."""
        size = os.fstat(self.descriptor).st_size
        if size:
            shared_memory.punch_hole(self.descriptor, size)
        self._shape, self._memory = _ArenaShape(), memoryview(b"")

    def reload(self) -> None:
        """Map the memory in its current shape."""
        shape = self._shape_found()
        if shape.stamp != self._shape.stamp:
            self._map(shape)

    def _shape_found(self) -> _ArenaShape:
        if os.fstat(self.descriptor).st_size < PAGE:
            return _ArenaShape()
        payload = _unseal(memoryview(os.pread(self.descriptor, PAGE, 0)), _SHAPE_MARK)
        return _ArenaShape(**json.loads(payload)) if payload is not None else _ArenaShape()

    def _map(self, shape: _ArenaShape) -> None:
        self._memory = shared_memory.map_shared(self.descriptor, shape.size) if shape.buffers else memoryview(b"")
        self._shape = shape

    def populate(self) -> None:
        """Populate this process's page table now instead of on first use of each page."""
        shared_memory.populate(self._memory)

    def use_huge_pages(self, stopped: Callable[[], bool]) -> None:
        """Collapse the memory into huge pages if possible. This takes seconds per GiB, and both sides benefit."""
        memory = self._memory  # stays mapped even if the shape changes in the meantime
        shared_memory.use_huge_pages(memory, stopped)

    def buffer(self, index: int) -> memoryview:
        """Return the bytes of one buffer, writable and page-aligned."""
        assert 0 <= index < self.buffers, f"buffer {index} of {self.buffers}"
        start = self._shape.buffer_offset(index)
        return self._memory[start : start + self.buffer_bytes]

    def _record_area(self, index: int) -> memoryview:
        assert 0 <= index < self.buffers, f"record {index} of {self.buffers}"
        start = self._shape.record_offset(index)
        return self._memory[start : start + self._shape.record_bytes]

    def clear(self, index: int) -> None:
        """Invalidate a buffer's record. Must be called before writing into the buffer."""
        self._record_area(index)[: _SEAL.size] = bytes(_SEAL.size)

    def publish(self, index: int, record: BufferRecord) -> None:
        """Record a buffer's contents as valid. Raises ValueError if the record does not fit its area."""
        assert record.plan == self.plan, "a record from another plan"
        self.clear(index)
        _seal(self._record_area(index), _RECORD_MARK, encode(record))

    def record(self, index: int) -> BufferRecord | None:
        """Return a buffer's record; None if it is missing, torn or invalid."""
        if index >= self.buffers:
            return None
        payload = _unseal(self._record_area(index), _RECORD_MARK)
        if payload is None:
            return None
        record: BufferRecord = decode(payload)
        return record if record.plan == self.plan else None

    def close(self) -> None:
        """Close the descriptor. The memory is freed once neither side has a view of it left."""
        self._shape, self._memory = _ArenaShape(), memoryview(b"")
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _seal(area: memoryview, mark: bytes, payload: bytes) -> None:
    """Write the payload first and the seal last, so that a crash in between leaves an invalid record."""
    if _SEAL.size + len(payload) > len(area):
        raise ValueError(f"{len(payload)} bytes do not fit into {len(area) - _SEAL.size}")
    area[_SEAL.size : _SEAL.size + len(payload)] = payload
    area[: _SEAL.size] = _SEAL.pack(mark, len(payload), xxhash.xxh3_128_digest(payload))


def _unseal(area: memoryview, mark: bytes) -> bytes | None:
    """Return the payload under a seal; None if the seal is missing or torn."""
    found, length, claimed = _SEAL.unpack(area[: _SEAL.size])
    if found != mark or length > len(area) - _SEAL.size:
        return None
    payload = bytes(area[_SEAL.size : _SEAL.size + length])
    return payload if xxhash.xxh3_128_digest(payload) == claimed else None
