"""The safetensors format: what is laid out is read back, and a file that is anything else is refused."""

import io
import json
import struct
from typing import Any

import pytest

from checkpointing.format.manifest import TensorInfo
from checkpointing.format.safetensors import Malformed, lay_out, read_header

TENSORS = {"a": TensorInfo("float32", (2, 3)), "none": TensorInfo("int64", (0,)), "scalar": TensorInfo("bfloat16", ())}


def file_of(described: Any, values: bytes) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + values


def entry(dtype: str = "U8", shape: list[Any] | None = None, start: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [start, end]}


def test_a_header_is_read_as_it_was_laid_out() -> None:
    made = lay_out(TENSORS, {"format": "pt"})
    assert len(made.encoded) % 8 == 0
    assert made.size == len(made.encoded) + 24 + 0 + 2
    read = read_header(io.BytesIO(made.encoded + bytes(26)), made.size)
    assert read.tensors == made.tensors
    assert {name: place.info for name, place in read.tensors.items()} == TENSORS


def test_an_unknown_dtype_is_reported() -> None:
    with pytest.raises(ValueError, match="a is complex128"):
        lay_out({"a": TensorInfo("complex128", (1,))}, {})


@pytest.mark.parametrize(
    ("data", "reported"),
    [
        (b"", "shorter"),
        (struct.pack("<Q", 1 << 60), "invalid header size"),
        (file_of(b"\xff\xfe", b""), "invalid header: "),
        (file_of([1], b""), "invalid header: "),
        (file_of({"a": 3}, b""), "invalid header: "),
        (file_of({"a": entry("Q4")}, bytes(4)), "Q4"),
        (file_of({"a": entry()}, bytes(3)), "file ends at"),
        (file_of({"a": entry()}, bytes(5)), "appended"),
        (file_of({"a": entry(shape=[5])}, bytes(4)), "4 bytes to a uint8 tensor of shape"),
        (file_of({"a": entry(shape=[-4], end=-4)}, bytes(4)), "not an integer"),
        (file_of({"a": entry(shape=[2.0, 2])}, bytes(4)), "not an integer"),
        (file_of({"a": entry(shape=[True, 4])}, bytes(4)), "not an integer"),
        (file_of({"a": entry(), "b": entry()}, bytes(4)), "the previous values end at"),
        (file_of({"a": entry(start=2, end=6)}, bytes(6)), "the previous values end at"),
        (file_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)), "duplicate name"),
        (file_of(b"[" * 100_000, b""), "invalid header: "),
    ],
)
def test_malformed_headers_are_refused(data: bytes, reported: str) -> None:
    with pytest.raises(Malformed, match=reported):
        read_header(io.BytesIO(data), len(data))
