"""Parser for the zip archive in which torch.save stores one tensor. It does not use torch.

It also executes nothing: the tensor's description is unpickled with substitutes for the few names that it uses.
"""

import collections
import copyreg
import errno
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MARK = b"PK\x03\x04"
_LONGEST = 1 << 20
_MALFORMED = (
    zipfile.BadZipFile, pickle.UnpicklingError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError,
    struct.error, NotImplementedError, RuntimeError, RecursionError,
)  # fmt: skip
"""Exceptions raised when reading an invalid archive."""

ReadAt = Callable[[int, int], bytes]
"""Function that, given an offset and a length, returns those bytes of a file; fewer at the end of the file."""


@dataclass(frozen=True, slots=True)
class TorchRecord:
    """A tensor saved by torch.save. `data` is the offset in the record of its `nbytes` of row-major values."""

    dtype: str
    shape: tuple[int, ...]
    data: int
    nbytes: int


def read_record(read: ReadAt, start: int, length: int) -> TorchRecord:
    """Parse the record in these bytes of a file. Raises ValueError unless it holds one whole plain tensor."""
    try:
        with zipfile.ZipFile(FileSection(read, start, length)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            described, values = members["data.pkl"], members["data/0"]
            if described.compress_type or values.compress_type or described.file_size > _LONGEST:
                raise ValueError("unsupported archive: data.pkl is compressed")
        # Not read through the archive, which would compare checksums; torch can be configured to omit them.
        place = start + member_offset(read, start, length, described)
        dtype, shape = _describe(read(place, described.file_size))
        return TorchRecord(dtype, shape, member_offset(read, start, length, values), values.file_size)
    except _MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def make_reader(stream: BinaryIO) -> ReadAt:
    """Return a function that reads bytes at given offsets of a stream."""

    def read(place: int, length: int) -> bytes:
        stream.seek(place)
        return stream.read(length)

    return read


def member_offset(read: ReadAt, start: int, length: int, member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes, which follow its local header, from the start of the record."""
    mark, name, extra = _LOCAL_HEADER.unpack(read(start + member.header_offset, _LOCAL_HEADER.size))
    place = member.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
    if mark != _MARK or place + member.file_size > length:
        raise ValueError("its local header is invalid")
    return place


class FileSection(io.RawIOBase):
    """A section of a file, presented as a file."""

    def __init__(self, read: ReadAt, start: int, length: int) -> None:
        self._read, self._start, self._length, self._at = read, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if place < 0:
            raise OSError(errno.EINVAL, "negative seek position")  # real files raise this, and zipfile expects it
        self._at = place
        return place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._read(self._start + self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _describe(data: bytes) -> tuple[str, tuple[int, ...]]:
    dtype, numel, offset, shape, stride = _TensorUnpickler(io.BytesIO(data)).load()
    dense = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    # Strides are meaningless for a dimension of size 1 and for an empty tensor.
    loose = any(size > 1 and step != want for size, step, want in zip(shape, stride, dense, strict=True))
    if offset or math.prod(shape) != numel or (numel and loose):
        raise ValueError("the tensor is a view of other values")
    return dtype, tuple(shape)


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that turns a tensor's pickle into (dtype, number of values, offset, shape, stride)."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        # Extension codes resolved earlier come from this cache and bypass `find_class`.
        copyreg.clear_extension_cache()

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, _key, _place, numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"it refers to a {kind}")
        return dtype, numel

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return ""
        if module == "torch" and name.isidentifier():
            return _STORAGES.get(name, name)  # a storage type, or a dtype under its own name
        raise pickle.UnpicklingError(f"it requests {module}.{name}")


def _rebuilt(
    storage: Any, offset: int, shape: Any, stride: Any, _grad: bool, _hooks: Any, dtype: str = "", *_more: Any
) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...]]:
    named, numel = storage
    if named:
        return named, numel, offset, tuple(shape), tuple(stride)
    return dtype, math.prod(shape), offset, tuple(shape), tuple(stride)  # an untyped storage counts in bytes
