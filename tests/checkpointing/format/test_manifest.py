"""The manifest reads back exactly, and nothing that was changed reads back at all."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import ManifestError
from checkpointing.format.manifest import FileEntry, Manifest, parse
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
def test_what_is_encoded_reads_back_equal_and_neither_changed_nor_torn(manifest: Manifest, data: st.DataObject) -> None:
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
    """A manifest with some fields changed by somebody who knows how to redo the self digest."""
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
        ({"files": [entry(name="../../etc/passwd")]}, "not one of a checkpoint"),
        ({"files": [entry(name="COMMIT")]}, "not one of a checkpoint"),
        ({"files": [entry(name="..")]}, "not one of a checkpoint"),
        ({"files": [entry(size=-1)]}, "makes no sense"),
        ({"files": [entry(size=1.0)]}, "makes no sense"),
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


def test_a_failed_write_gives_the_file_up_and_is_remembered() -> None:
    class Broken(_Collected):
        def write(self, data: bytes | bytearray | memoryview) -> int:
            raise OSError(28, "No space left on device")

    broken = Broken()
    sink = DigestSink(broken)
    with pytest.raises(OSError, match="No space"), sink:
        sink.write(b"x")
    assert broken.ended == "aborted"
    assert sink.error is not None
    assert sink.error.errno == 28


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
