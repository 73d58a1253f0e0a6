"""The safetensors format: 8 bytes of length, a JSON header, then the values of all tensors without gaps.

The library is not used, because whole models pass through a few rows at a time and its PyTorch side needs NumPy.
Format: https://github.com/huggingface/safetensors, section "Format".
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from checkpointing.format.manifest import TensorInfo

DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "C64": ("complex64", 8),
}  # fmt: skip
"""Maps the format's name for a dtype to torch's name and the size in bytes."""

_WORDS = {name: (word, size) for word, (name, size) in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the library rejects longer ones
_METADATA = "__metadata__"


class Malformed(ValueError):
    """A file that is not in the format. The message says what is wrong."""


@dataclass(frozen=True)
class TensorLocation:
    """A tensor and the location of its values in the file, in bytes."""

    info: TensorInfo
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The beginning of a file as bytes, and the tensors that follow."""

    encoded: bytes
    tensors: dict[str, TensorLocation]
    size: int
    """Size of the whole file in bytes."""


def lay_out(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> Header:
    """Return a header for these tensors, in this order. Raises ValueError for a dtype that the format lacks."""
    described: dict[str, Any] = {_METADATA: dict(metadata)}
    spans, end = {}, 0
    for name, info in tensors.items():
        if info.dtype not in _WORDS:
            raise ValueError(f"{name} is {info.dtype}, which safetensors does not support")
        word, size = _WORDS[info.dtype]
        start, end = end, end + math.prod(info.shape) * size
        described[name] = {"dtype": word, "shape": list(info.shape), "data_offsets": [start, end]}
        spans[name] = (info, start, end - start)
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    encoded = struct.pack("<Q", len(text)) + text
    places = {name: TensorLocation(info, len(encoded) + start, nbytes) for name, (info, start, nbytes) in spans.items()}
    return Header(encoded, places, len(encoded) + end)


def read_header(stream: BinaryIO, size: int) -> Header:
    """Return the header of a file of `size` bytes. Raises Malformed unless it describes exactly these bytes."""
    encoded, described = _read_entries(stream, size)
    try:
        places = {name: _place(entry, len(encoded)) for name, entry in described.items()}
    except Malformed:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise Malformed(f"invalid header: {type(error).__name__}: {error}") from error
    _check_whole(places, len(encoded), size)
    return Header(encoded, places, size)


def check_length(stream: BinaryIO, size: int) -> None:
    """Raise Malformed unless the values end exactly at the end of the file of `size` bytes. Accepts any dtype."""
    encoded, described = _read_entries(stream, size)
    try:
        end = max((int(entry["data_offsets"][1]) for entry in described.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise Malformed(f"invalid header: {type(error).__name__}: {error}") from error
    if len(encoded) + end != size:
        raise Malformed(_ENDS.format(len(encoded) + end, size))


_ENDS = "its values end at byte {}, but the file ends at {} (truncated, or data was appended)"


def _read_entries(stream: BinaryIO, size: int) -> tuple[bytes, dict[str, Any]]:
    """Return the file's bytes up to its values, and the entries in its header."""
    begin = stream.read(8)
    if len(begin) < 8:
        raise Malformed("it is shorter than 8 bytes")
    (length,) = struct.unpack("<Q", begin)
    if length > min(_LONGEST_HEADER, size - 8):
        raise Malformed(f"invalid header size: {length} bytes")
    text = stream.read(length)
    try:
        described = json.loads(text, object_pairs_hook=_unique)
        described.pop(_METADATA, None)
        described.items()
    except Malformed:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(f"invalid header: {type(error).__name__}: {error}") from error
    return begin + text, described


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("duplicate name in its header")
    return found


def _place(entry: dict[str, Any], base: int) -> TensorLocation:
    dtype, size = DTYPES[entry["dtype"]]
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise Malformed("its header has a size or offset that is not an integer")
    if end - start != math.prod(shape) * size:
        raise Malformed(f"its header assigns {end - start} bytes to a {dtype} tensor of shape {shape}")
    return TensorLocation(TensorInfo(dtype, shape), base + start, end - start)


def _check_whole(places: Mapping[str, TensorLocation], start: int, size: int) -> None:
    """Check that the values run without gap or overlap up to the end of the file."""
    at = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if place.start != at:
            raise Malformed(f"the values of {name} begin at byte {place.start}, but the previous values end at {at}")
        at += place.nbytes
    if at != size:
        raise Malformed(_ENDS.format(at, size))
