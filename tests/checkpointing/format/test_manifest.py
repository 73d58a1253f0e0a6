"""The manifest reads back exactly, and a changed one is refused."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import ManifestError
from checkpointing.format.manifest import (
    FileEntry,
    Index,
    Manifest,
    Piece,
    TensorInfo,
    encode_fingerprints,
    parse,
    parse_fingerprints,
    parse_index,
)
from checkpointing.storage.digests import CHUNK, DigestSink, digest
from checkpointing.storage.durable import canonical

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, json_values, max_size=4)


@st.composite
def entries(draw: st.DrawFn, name: st.SearchStrategy[str]) -> FileEntry:
    size, chunk = draw(st.integers(0, 5000)), draw(st.integers(1, 4000))
    digests = [digest(bytes([n % 256])) for n in range(-(-size // chunk))]
    return FileEntry(name=draw(name), size=size, chunk_size=chunk, chunks=tuple(digests))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    shards = draw(st.lists(entries(st.from_regex(r"__[0-9]{1,5}_0\.distcp", fullmatch=True)), max_size=4,
                           unique_by=lambda entry: entry.name))  # fmt: skip
    return Manifest(
        name="step-00000007.002-ab12cd34",
        step=draw(st.integers(0, 10**9)),
        attempt=draw(st.integers(1, 999)),
        nonce="ab12cd34",
        created_at=draw(st.floats(0, 4e9)),
        torch="2.13.0",
        world=draw(objects),
        files=(draw(entries(st.just(".metadata"))), *shards),
        extra=draw(objects),
    )


@given(manifests(), st.data())
def test_a_manifest_reads_back_equal_and_changed_or_torn_ones_are_refused(
    manifest: Manifest, data: st.DataObject
) -> None:
    encoded = manifest.encode()
    again = parse(encoded)
    assert again == manifest
    assert again.digest == manifest.digest
    assert again.encode() == encoded
    changed = bytearray(encoded)
    changed[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError):
        parse(bytes(changed))
    with pytest.raises(ManifestError):
        parse(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def signed(**changes: object) -> bytes:
    """A manifest with changed fields and a correct self digest."""
    plain = Manifest(name="n", step=1, attempt=1, nonce="a", created_at=0.0, torch="2", world={},
                     files=(FileEntry(name=".metadata", size=0, chunks=()),))  # fmt: skip
    fields = {**json.loads(plain.encode()), **changes}
    fields.pop("digest")
    return canonical({**fields, "digest": digest(canonical(fields))})


def entry(**changes: object) -> dict[str, object]:
    return {"name": ".metadata", "size": 0, "chunk_size": CHUNK, "chunks": [], **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "orch.manifest/2"}, "schema"),
        ({"surprise": 1}, "malformed"),
        ({"step": "1"}, "wrong type"),
        ({"step": True}, "wrong type"),
        ({"extra": []}, "wrong type"),
        ({"files": []}, "does not list .metadata"),
        ({"files": [entry(), entry()]}, "twice"),
        ({"files": [entry(name="../../etc/passwd")]}, "not allowed in a checkpoint"),
        ({"files": [entry(name="COMMIT")]}, "not allowed in a checkpoint"),
        ({"files": [entry(name="..")]}, "not allowed in a checkpoint"),
        ({"files": [entry(size=-1)]}, "invalid size"),
        ({"files": [entry(size=1.0)]}, "invalid size"),
        ({"files": [entry(size=5)]}, "0 digests for 5 bytes"),
        ({"files": [entry(size=5, chunks=["zz"])]}, "32 hex digits"),
        ({"files": [entry(more=1)]}, "malformed"),
        ({"files": 7}, "malformed"),
    ],
)
def test_a_well_signed_but_senseless_manifest_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parse(signed(**changes))


def test_non_finite_numbers_become_the_agreed_strings() -> None:
    manifest = parse(signed())
    with_nan = Manifest(**{**manifest.__dict__, "extra": {"loss": math.nan, "best": -math.inf}})
    assert parse(with_nan.encode()).extra == {"loss": "nan", "best": "-inf"}


class _Collected:
    def __init__(self) -> None:
        self.data, self.ended = b"", ""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.data += bytes(data)
        return len(data)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 32))
def test_chunk_digests_do_not_depend_on_how_bytes_arrive(pieces: list[bytes], chunk: int) -> None:
    collected = _Collected()
    with DigestSink(collected, chunk) as sink:
        for piece in pieces:
            sink.write(piece)
    whole = b"".join(pieces)
    expected = tuple(digest(whole[at : at + chunk]) for at in range(0, len(whole), chunk))
    assert (collected.data, sink.size, sink.chunks, collected.ended) == (whole, len(whole), expected, "closed")


def test_a_failed_write_aborts_the_file() -> None:
    class Broken(_Collected):
        def write(self, data: bytes | bytearray | memoryview) -> int:
            raise OSError(28, "No space left on device")

    broken = Broken()
    sink = DigestSink(broken)
    with pytest.raises(OSError, match="No space"), sink:
        sink.write(b"x")
    assert broken.ended == "aborted"


def test_a_manifest_knows_its_files_and_their_bytes() -> None:
    listed = [FileEntry(name=name, size=size, chunks=("0" * 32,)) for name, size in ((".metadata", 5), ("a", 7))]
    made = Manifest(
        name="step-00000007.002-ab12cd34", step=7, attempt=2, nonce="ab12cd34", created_at=1.0, torch="2.13.0",
        world={},
        files=tuple(listed),
    )  # fmt: skip
    assert made.size == 12
    assert (made.file("a"), made.file("b")) == (listed[1], None)


def test_a_manifest_that_others_have_written_again_is_refused() -> None:
    with pytest.raises(ManifestError, match="not in canonical form"):
        parse(json.dumps(json.loads(signed()), indent=1).encode())


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
        (replace(UPPER, offsets=(-1, 0)), "a: a position or size is not an integer"),
        (replace(UPPER, nbytes=24.0), "a: a position or size is not an integer"),  # type: ignore[arg-type]
        (replace(UPPER, start=True), "a: a position or size is not an integer"),
        (replace(UPPER, offsets=(0,)), "a: a piece and its tensor have different numbers of dimensions"),
        (replace(UPPER, offsets=(0,), sizes=(2,)), "a: a piece and its tensor have different numbers of dimensions"),
        (replace(LOWER, offsets=(3, 0)), "a: a piece lies outside its tensor"),
        (replace(LOWER, offsets=(2, 1)), "a: a piece lies outside its tensor"),
        (replace(UPPER, data=63), "a: a piece's values do not fit its frame"),
        (replace(UPPER, data=141), "a: a piece's values do not fit its frame"),
        (replace(UPPER, nbytes=25), "a: a piece's values do not fit its frame"),
        (replace(UPPER, key="b"), "'b'"),
    ],
)
def test_an_impossible_piece_is_refused(piece: Piece, why: str) -> None:
    data = Index(TENSORS, (piece,)).encode()
    with pytest.raises(ManifestError, match=f"^index.json is malformed: {why}$"):
        parse_index(data)


@pytest.mark.parametrize("piece", [UPPER, LOWER, SCALAR, EMPTY, replace(UPPER, data=140), replace(UPPER, data=64)])
def test_a_piece_may_touch_the_ends_of_its_tensor_and_of_its_frame(piece: Piece) -> None:
    assert parse_index(Index(TENSORS, (piece,)).encode()).pieces == (piece,)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b'{"tensors":{"a":1},"pieces":[]}', b'{"tensors":{}}'])
def test_anything_but_an_index_is_malformed(data: bytes) -> None:
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
    with pytest.raises(ManifestError, match=r"^index.json does not have schema orch.index/1$"):
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
        with pytest.raises(ManifestError, match=r"^fingerprints.json does not have schema orch.fingerprints/1$"):
            parse_fingerprints(bad)
    for torn in (b"", b"[]", b"{}", good[:-1]):
        with pytest.raises(ManifestError, match=r"^fingerprints.json is malformed: "):
            parse_fingerprints(torn)
