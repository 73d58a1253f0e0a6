"""What torch.save puts around the values of one dense tensor: bytes that depend on its dtype and shape only.

With record checksums off (a manifest has better ones), the template can be laid out once and the values written between
its two halves, again and again; what comes out is a stock torch.save file. Every template is checked when it is made.
"""

import io
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from checkpointing.format.torch_record import locate_values, read_at

ALIGNMENT = 64
"""Bytes to which torch.save aligns values; a record that begins at such an offset keeps them aligned."""

_SMALL = 1 << 16
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which this Python's mmap does not name


class RecordFormatError(RuntimeError):
    """This torch writes tensors in a form that cannot be laid out in advance."""


@dataclass(frozen=True, slots=True)
class RecordTemplate:
    """The bytes before and after the values of one tensor."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole: head, values, tail."""
        return len(self.head) + self.nbytes + len(self.tail)


@lru_cache(maxsize=4096)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """The template of a contiguous tensor, without touching memory for its values; raises RecordFormatError."""
    nbytes = math.prod(shape) * dtype.itemsize
    made = _small_template(dtype, shape) if nbytes <= _SMALL else _large_template(dtype, shape, nbytes)
    if made.nbytes != nbytes or len(made.head) % ALIGNMENT:
        raise RecordFormatError(
            f"torch {torch.__version__} lays a {dtype} tensor of shape {shape} out in an unknown way"
        )
    return made


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _small_template(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """Cut out of a real file, and compared with a real file of other values."""
    zeros, others = torch.zeros(shape, dtype=dtype), _bytes_of_its_own(dtype, shape)
    saved = _saved(zeros)
    start, nbytes = _place_of_values(saved)
    made = RecordTemplate(saved[:start], nbytes, saved[start + nbytes :])
    values = bytes(others.reshape(-1).view(torch.uint8).tolist()) if nbytes else b""
    if made.head + values + made.tail != _saved(others):
        raise RecordFormatError(
            f"torch {torch.__version__} writes a {dtype} tensor with bytes that depend on its values"
        )
    return made


def _bytes_of_its_own(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = math.prod(shape)
    # Zeros and ones only: any other byte would be no legal bool.
    pattern = (torch.arange(numel * dtype.itemsize) % 2).to(torch.uint8)
    return pattern.view(dtype).reshape(shape) if numel else torch.zeros(shape, dtype=dtype)


def _saved(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    with _without_checksums():
        torch.save(tensor, stream)
    return stream.getvalue()


def _place_of_values(saved: bytes) -> tuple[int, int]:
    """Where the values begin in a torch.save file, and how many bytes they are."""
    try:
        return locate_values(read_at(io.BytesIO(saved)), 0, len(saved))
    except ValueError as error:
        reason = f"torch {torch.__version__} does not store a tensor's values as one plain record: {error}"
        raise RecordFormatError(reason) from error


class _Around:
    """A file that keeps everything but the values, which it never looks at."""

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
    """Values of this size are written by torch in one piece: everything before and after it is the template."""
    small_enough = tuple(min(length, 2) for length in shape)
    template(dtype, small_enough)  # the checks that need memory, on a small relative
    around = _Around(nbytes)
    # Never touched, and never charged for: a tensor may be larger than what is free.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    with _without_checksums():
        torch.save(torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape), cast(IO[bytes], around))
    if not around.whole:
        raise RecordFormatError(f"torch {torch.__version__} does not write a large tensor's values in one piece")
    head, tail = around.halves
    return RecordTemplate(bytes(head), nbytes, bytes(tail))
