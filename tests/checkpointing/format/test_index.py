"""`index.json` and `fingerprints.json`: written one way, and refused in every other."""

import json
from dataclasses import replace
from typing import Any

import pytest

from checkpointing.errors import ManifestError
from checkpointing.format.manifest import Index, Piece, TensorInfo, encode_fingerprints, parse_fingerprints, parse_index

UPPER = Piece("a", "f0", (0, 0), (2, 3), start=64, length=100, data=128, nbytes=24)
LOWER = Piece("a", "f1", (2, 0), (2, 3), start=0, length=24, data=0, nbytes=24)
SCALAR = Piece("ü", "f1", (), (), start=24, length=8, data=24, nbytes=8)
EMPTY = Piece("none", "f1", (0,), (0,), start=32, length=9, data=41, nbytes=0)
TENSORS = {"ü": TensorInfo("float64", ()), "a": TensorInfo("float32", (4, 3)), "none": TensorInfo("int64", (0,))}
INDEX = Index(TENSORS, (UPPER, LOWER, EMPTY, SCALAR))


def test_an_index_reads_back_and_its_bytes_have_one_order() -> None:
    data = INDEX.encode()
    assert parse_index(data) == INDEX
    assert Index(dict(reversed(TENSORS.items())), INDEX.pieces[::-1]).encode() == data
    assert data.startswith(b'{"pieces":[["a","f0",[0,0],[2,3],64,100,128,24],["a","f1",[2,0],')
    assert '"ü"'.encode() in data


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (replace(UPPER, offsets=(-1, 0)), "a: a place is not a whole number"),
        (replace(UPPER, nbytes=24.0), "a: a place is not a whole number"),  # type: ignore[arg-type]
        (replace(UPPER, start=True), "a: a place is not a whole number"),
        (replace(UPPER, offsets=(0,)), "a: a piece has another number of dimensions than its tensor"),
        (replace(UPPER, offsets=(0,), sizes=(2,)), "a: a piece has another number of dimensions than its tensor"),
        (replace(LOWER, offsets=(3, 0)), "a: a piece lies outside of its tensor"),
        (replace(LOWER, offsets=(2, 1)), "a: a piece lies outside of its tensor"),
        (replace(UPPER, data=63), "a: a piece's values do not fit its frame"),
        (replace(UPPER, data=141), "a: a piece's values do not fit its frame"),
        (replace(UPPER, nbytes=25), "a: a piece's values do not fit its frame"),
        (replace(UPPER, key="b"), "'b'"),
    ],
)
def test_a_piece_that_cannot_be_is_refused(piece: Piece, why: str) -> None:
    data = Index(TENSORS, (piece,)).encode()
    with pytest.raises(ManifestError, match=f"^index.json is malformed: {why}$"):
        parse_index(data)


@pytest.mark.parametrize("piece", [UPPER, LOWER, SCALAR, EMPTY, replace(UPPER, data=140), replace(UPPER, data=64)])
def test_a_piece_may_touch_the_ends_of_its_tensor_and_of_its_frame(piece: Piece) -> None:
    assert parse_index(Index(TENSORS, (piece,)).encode()).pieces == (piece,)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b'{"tensors":{"a":1},"pieces":[]}', b'{"tensors":{}}'])
def test_what_is_no_index_is_malformed(data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"^index.json is malformed: "):
        parse_index(data)


def changed(data: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(data), **fields}, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [
        changed(Index().encode(), schema="orch.index/2"),
        changed(Index().encode(), more=1),
        Index().encode() + b"\n",
        Index(TENSORS, (LOWER,)).encode().replace(b'"a"', b'"\\u0061"'),
    ],
    ids=["schema", "field", "newline", "escape"],
)
def test_an_index_that_was_written_in_another_way_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"^index.json is not of schema orch.index/1$"):
        parse_index(data)


def test_fingerprints_read_back_and_their_bytes_have_one_order() -> None:
    values = {"ü": "0123456789abcdef", "a": "f" * 16}
    data = encode_fingerprints(values)
    assert parse_fingerprints(data) == values
    assert encode_fingerprints(dict(reversed(values.items()))) == data
    assert data == (
        '{"schema":"orch.fingerprints/1","tensors":{"a":"ffffffffffffffff","ü":"0123456789abcdef"}}'.encode()
    )


def test_other_fingerprints_are_refused() -> None:
    good = encode_fingerprints({"a": "f" * 16})
    for bad in (changed(good, schema="orch.fingerprints/2"), good + b" ", changed(good, tensors={"a": 1})):
        with pytest.raises(ManifestError, match=r"^fingerprints.json is not of schema orch.fingerprints/1$"):
            parse_fingerprints(bad)
    for torn in (b"", b"[]", b"{}", good[:-1]):
        with pytest.raises(ManifestError, match=r"^fingerprints.json is malformed: "):
            parse_fingerprints(torn)
