"""The layout of a rank's tensors in its files and in the arena.

Because record checksums are omitted (the manifest has better ones), a template is laid out once, and values can be
written between its two halves any number of times. The result is an ordinary torch.save file. Every template is checked
when it is created.

A file begins at a page boundary in the buffer and is padded to whole pages, so that direct I/O can write it. A record
begins at a multiple of 64 bytes, so that its values are aligned. Tensors of the same dtype and shape are adjacent and
evenly spaced, so that one operation can process many of them.
"""

import io
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from checkpointing.format.manifest import Piece
from checkpointing.format.torch_record import make_reader, read_record
from checkpointing.message_codec import peer_message
from checkpointing.storage.shared_memory import PAGE, whole_pages

ALIGNMENT = 64
"""Alignment of values in torch.save, in bytes. Values stay aligned if the record starts at a multiple of it."""

_SMALL = 1 << 16
_NO_RESERVE = 0x4000  # MAP_NORESERVE, missing from this Python's mmap


def region(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of the part of a tensor at these offsets."""
    if tuple(tensor.shape) == tuple(sizes):
        return tensor
    found = tensor.detach()
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        found = found.narrow(dimension, offset, size)
    return found


class RecordFormatError(RuntimeError):
    """This version of torch writes tensors in a form that cannot be laid out in advance."""


@dataclass(frozen=True, slots=True)
class RecordTemplate:
    """The bytes before and after the values of one tensor."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole record: head, values, tail."""
        return len(self.head) + self.nbytes + len(self.tail)


@lru_cache(maxsize=4096)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """Return the template of a contiguous tensor without using memory for its values. Raises RecordFormatError."""
    nbytes = math.prod(shape) * dtype.itemsize
    made = _small_template(dtype, shape) if nbytes <= _SMALL else _large_template(dtype, shape, nbytes)
    if made.nbytes != nbytes or len(made.head) % ALIGNMENT:
        raise RecordFormatError(
            f"torch {torch.__version__} uses an unknown layout for a {dtype} tensor of shape {shape}"
        )
    return made


def placeholder_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose memory is never touched or reserved, so it may be larger than the free memory."""
    if not (nbytes := math.prod(shape) * dtype.itemsize):
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch.save omit record checksums, which torch itself does not check. The manifest has better ones."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _small_template(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """Return a template cut from a real file, after comparing that file with one that holds different values."""
    zeros, others = torch.zeros(shape, dtype=dtype, device="cpu"), _alternating_tensor(dtype, shape)
    saved = _save_to_bytes(zeros)
    try:
        record = read_record(make_reader(io.BytesIO(saved)), 0, len(saved))
    except ValueError as error:
        reason = f"torch {torch.__version__} does not store a tensor's values as one plain record: {error}"
        raise RecordFormatError(reason) from error
    made = RecordTemplate(saved[: record.data], record.nbytes, saved[record.data + record.nbytes :])
    values = bytes(others.reshape(-1).view(torch.uint8).tolist()) if record.nbytes else b""
    if made.head + values + made.tail != _save_to_bytes(others):
        raise RecordFormatError(
            f"torch {torch.__version__} writes a {dtype} tensor with bytes that depend on its values"
        )
    return made


def _alternating_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = math.prod(shape)
    # Zeros and ones only: any other byte would be an invalid bool.
    pattern = (torch.arange(numel * dtype.itemsize, device="cpu") % 2).to(torch.uint8)
    return pattern.view(dtype).reshape(shape) if numel else torch.zeros(shape, dtype=dtype, device="cpu")


def _save_to_bytes(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    with without_checksums():
        torch.save(tensor, stream)
    return stream.getvalue()


class _ValueSkipper:
    """File object that keeps everything written to it except the values, which it never reads."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._found = nbytes, 0
        self.halves = (bytearray(), bytearray())

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) == self._nbytes:
            self._found += 1
        else:
            self.halves[min(self._found, 1)].extend(view)
        return len(view)

    def flush(self) -> None:
        return

    @property
    def whole(self) -> bool:
        return self._found == 1 and b"/data/0" in self.halves[0]


def _large_template(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> RecordTemplate:
    """Return the template of a large tensor. torch writes the values in one piece, and the template is the rest."""
    small_enough = tuple(min(length, 2) for length in shape)
    template(dtype, small_enough)  # runs the checks that need memory, on a smaller tensor
    skipper = _ValueSkipper(nbytes)
    with without_checksums():
        torch.save(placeholder_tensor(dtype, shape), cast(IO[bytes], skipper))
    if not skipper.whole:
        raise RecordFormatError(f"torch {torch.__version__} does not write a large tensor's values in one piece")
    head, tail = skipper.halves
    return RecordTemplate(bytes(head), nbytes, bytes(tail))


FileSpan = tuple[str, int, int]
"""A file's name, offset in the buffer, and size."""


@peer_message
@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a tensor to write: a block of `shape` values at `offsets` in a tensor of shape `whole`.

    `within` is the block's start in the rank's own part of the tensor. The last three fields are for torch's planner.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    within: tuple[int, ...]
    sharded: bool = False
    requires_grad: bool = False
    pinned: bool = False

    @property
    def template(self) -> RecordTemplate:
        return template(self.dtype, self.shape)


@peer_message
@dataclass(frozen=True, slots=True)
class Item:
    """A share and its location. `place` is the offset of its values in the buffer, `piece` its entry in the index."""

    share: Share
    place: int
    piece: Piece

    @property
    def key(self) -> str:
        return self.share.key

    @property
    def dtype(self) -> torch.dtype:
        return self.share.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.share.shape


@dataclass(frozen=True)
class Part:
    """Contents of a buffer at one time: everything, or one bucket if memory is limited."""

    files: tuple[FileSpan, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class FileLayout:
    """All of one rank's parts, in the order in which they are written."""

    parts: tuple[Part, ...]

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer that can hold the largest part. At least one page, even for a rank that writes nothing."""
        return max([PAGE, *(offset + size for part in self.parts for _, offset, size in part.files)])

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for part in self.parts for item in part.items)

    @property
    def files(self) -> tuple[FileSpan, ...]:
        return tuple(span for part in self.parts for span in part.files)


@dataclass(frozen=True)
class PlannedFiles:
    """A rank's files or file regions (name, start of its part, size) and their items. Only rank 0 has `index`."""

    hash: str
    files: tuple[FileSpan, ...]
    items: tuple[Item, ...]
    index: bytes | None = None


def file_name(rank: int, number: int) -> str:
    """Return the name that DCP gives a rank's file."""
    return f"__{rank}_{number}.distcp"


def lay_out(shares: Iterable[Share], rank: int, files: int) -> FileLayout:
    """Lay out all shares in one buffer, as `files` files of similar size, or fewer if there are fewer tensors."""
    ordered = _sort_shares(shares)
    spans, items, offset = [], [], 0
    for number, group in enumerate(_divide_evenly(ordered, files)):
        placed, size = _place_items(group, file_name(rank, number), offset)
        items += placed
        spans.append((file_name(rank, number), offset, size))
        offset += size
    return FileLayout((Part(tuple(spans), tuple(items)),))


def lay_out_in_buckets(shares: Iterable[Share], rank: int, window: int) -> FileLayout:
    """Lay out shares as parts of one file each that fit in a buffer of `window` bytes. Larger shares are split."""
    pieces = [piece for share in shares for piece in split(share, window)]
    parts = []
    for number, group in enumerate(_fill_windows(_sort_shares(pieces), window)):
        placed, size = _place_items(group, file_name(rank, number), 0)
        parts.append(Part(((file_name(rank, number), 0, size),), tuple(placed)))
    return FileLayout(tuple(parts) or (Part((), ()),))


def split(share: Share, window: int) -> Iterator[Share]:
    """Yield the share or, if its record does not fit in a window, pieces cut along its first dimensions."""
    if _room(share) <= window or math.prod(share.shape) <= 1:
        yield share
        return
    axis = next(at for at, length in enumerate(share.shape) if length > 1)
    length = share.shape[axis]
    step = max(1, length * (window - 2 * PAGE) // max(1, share.template.nbytes))
    for start in range(0, length, min(step, length - 1)):
        yield from split(_cut(share, axis, start, min(step, length - 1, length - start)), window)


def _cut(share: Share, axis: int, start: int, length: int) -> Share:
    def shift(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number + (start if at == axis else 0) for at, number in enumerate(numbers))

    shape = tuple(length if at == axis else size for at, size in enumerate(share.shape))
    return replace(share, shape=shape, offsets=shift(share.offsets), within=shift(share.within))


def _sort_shares(shares: Iterable[Share]) -> list[Share]:
    """Sort the shares, largest first. Those of the same form and position are adjacent, ordered by name."""
    return sorted(shares, key=lambda share: (-share.template.nbytes, str(share.dtype), _form(share), share.key))


def _form(share: Share) -> tuple[tuple[int, ...], ...]:
    return share.shape, share.whole, share.offsets


def _room(share: Share) -> int:
    return -(-share.template.length // ALIGNMENT) * ALIGNMENT


def _divide_evenly(shares: Sequence[Share], files: int) -> Iterator[list[Share]]:
    """Yield groups of neighbours of about the same size in bytes."""
    total = sum(map(_room, shares))
    group: list[Share] = []
    passed, number = 0, 1
    for share in shares:
        group.append(share)
        passed += _room(share)
        if passed * files >= total * number:
            yield group
            group = []
            number = passed * files // max(1, total) + 1
    assert not group, "the last share completes the last file"


def _fill_windows(shares: Iterable[Share], window: int) -> Iterator[list[Share]]:
    group: list[Share] = []
    filled = 0
    for share in shares:
        if group and filled + _room(share) > window:
            yield group
            group, filled = [], 0
        group.append(share)
        filled += _room(share)
    if group:
        yield group


def _place_items(shares: Iterable[Share], name: str, offset: int) -> tuple[list[Item], int]:
    """Return the items of a file that begins at `offset` in the buffer, and the file's size."""
    items, start = [], 0
    for share in shares:
        record = share.template
        values = start + len(record.head)
        piece = Piece(
            key=share.key,
            file=name,
            offsets=share.offsets,
            sizes=share.shape,
            start=start,
            length=record.length,
            data=values,
            nbytes=record.nbytes,
        )
        items.append(Item(share, offset + values, piece))
        start += _room(share)
    return items, whole_pages(start)
