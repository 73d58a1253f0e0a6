"""What a `.metadata` may name, and that nothing of this process is changed by one."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.checkpointing.engine.built_checkpoint import build  # isort: skip  # first: it imports torch quietly

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, Metadata
from torch.serialization import _get_layout

from checkpointing.engine.restore.metadata_reader import (
    AllowList,
    ForeignAllowList,
    index_from_metadata,
    parse_metadata,
)
from checkpointing.errors import CheckpointRefused, UnsafePickle

META = "torch.distributed.checkpoint.metadata"


class ByName:
    """Pickles as `getattr(kind, member)`: Python before 3.11.4 does so with members of enums."""

    def __init__(self, kind: object, member: str) -> None:
        self.kind, self.member = kind, member

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.kind, self.member)


def test_members_of_enums_may_come_by_name_and_other_attributes_may_not() -> None:
    by_name = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert AllowList(by_name, "x").load() == "TORCH_CONTIGUOUS_FORMAT"
    for kind, member in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (torch.Size, "numel")):
        with pytest.raises(UnsafePickle, match="attribute"):
            AllowList(pickle.dumps(ByName(kind, member)), "x").load()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_is_read_as_dcp_reads_it(protocol: int) -> None:
    metadata = build({"a": torch.ones(3, 4), "b": torch.zeros((), dtype=torch.bfloat16)}).metadata
    data = pickle.dumps(metadata, protocol)
    for kind in (AllowList, ForeignAllowList):
        assert index_from_metadata(parse_metadata(data, "x", kind)) == index_from_metadata(metadata)


def sets(target: bytes, attribute: str) -> bytes:
    """Names `target`, then sets its attribute to 7: BUILD takes (None, {attribute: value}) for that."""
    return target + b"(N}S'" + attribute.encode() + b"'\nI7\nstb."


MEMBER = f"c{META}\n_MEM_FORMAT_ENCODING\n(I0\ntR".encode()


@pytest.mark.parametrize("kind", [AllowList, ForeignAllowList])
@pytest.mark.parametrize(
    ("data", "thing"),
    [
        (sets(f"c{META}\nMetadata\n".encode(), "planted"), Metadata),
        (sets(f"c{META}\nChunkStorageMetadata\n".encode(), "planted"), ChunkStorageMetadata),
        (sets(f"c{META}\n_MEM_FORMAT_ENCODING\n".encode(), "planted"), _MEM_FORMAT_ENCODING),
        (sets(MEMBER, "planted"), _MEM_FORMAT_ENCODING(0)),
        (MEMBER + b"}S'planted'\nI7\nsb.", _MEM_FORMAT_ENCODING(0)),
        (sets(b"ctorch.serialization\n_get_layout\n", "planted"), _get_layout),
        (sets(b"ctorch\nSize\n", "planted"), torch.Size),
        (sets(b"ctorch\nfloat32\n", "planted"), torch.float32),
    ],
)
def test_the_unpickler_changes_nothing_in_this_process(kind: type[AllowList], data: bytes, thing: Any) -> None:
    with pytest.raises(CheckpointRefused):
        parse_metadata(data, "x", kind)
    assert not hasattr(thing, "planted")


def deep(_: Metadata) -> bytes:
    return b"(" * 10 + b"\x8c\x01a" + b"(" * 100_000 + b"l" * 100_000 + b"."


def without_chunks(metadata: Metadata) -> bytes:
    del metadata.state_dict_metadata["a"].chunks
    return pickle.dumps(metadata)


def other_dimensions(metadata: Metadata) -> bytes:
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([3])
    return pickle.dumps(metadata)


def words_for_numbers(metadata: Metadata) -> bytes:
    next(iter(metadata.storage_data.values())).offset = "4"
    return pickle.dumps(metadata)


def before_the_file(metadata: Metadata) -> bytes:
    next(iter(metadata.storage_data.values())).offset = -4
    return pickle.dumps(metadata)


def huge(_: Metadata) -> bytes:
    return b"ctorch\nSize\n(I1\n(I2\ntt" + b"\x8a\xff" + b"\x7f" * 255 + b"R."


@pytest.mark.parametrize("made", [without_chunks, other_dimensions, words_for_numbers, before_the_file, deep, huge])
def test_forged_metadata_is_refused_whatever_torch_raises(made: Callable[[Metadata], bytes]) -> None:
    metadata = copy.deepcopy(build({"a": torch.ones(3, 4)}).metadata)
    with pytest.raises(CheckpointRefused, match="malformed|does not describe"):
        parse_metadata(made(metadata), "x")
