"""Files of a node's ranks in one file: where each begins, and the digests of the whole."""

from dataclasses import replace

import pytest

from checkpointing.format.commit import Region, assign_places, file_name, join_regions
from checkpointing.format.manifest import FileEntry
from checkpointing.storage.digests import CHUNK, digest, filled_digest


def entry(name: str, data: bytes) -> FileEntry:
    chunks = tuple(digest(data[at : at + CHUNK]) for at in range(0, max(1, len(data)), CHUNK))
    return FileEntry(name=name, size=len(data), chunks=chunks)


def region(name: str, data: bytes, file: str, at: int) -> Region:
    rest = data[len(data) - len(data) % CHUNK :]
    filled = filled_digest(rest) if rest else digest(data[-CHUNK:])
    return Region.from_entry(entry(name, data), filled, {name: (file, at)})


def test_ranks_of_a_node_follow_each_other_from_multiples_of_a_chunk_on() -> None:
    sizes = [{"r0": 1, "r0b": CHUNK}, {"r1": CHUNK + 1}, {"r2": 5}, {}, {"r4": 3}]
    found = assign_places(sizes, [True, False, True, False, False])
    assert found == [
        {"r0": ("__node0.distcp", 0), "r0b": ("__node0.distcp", CHUNK)},
        {"r1": ("__node0.distcp", 2 * CHUNK)},
        {"r2": ("__node1.distcp", 0)},
        {},
        {"r4": ("__node1.distcp", CHUNK)},
    ]
    assert assign_places([{"a": 1}], [False]) == [{"a": (file_name(0), 0)}], "the first rank always begins a file"


def test_the_digests_of_a_nodes_file_are_those_of_its_bytes() -> None:
    first, second, last = b"a" * (CHUNK + 5), b"b" * CHUNK, b"c" * 7
    whole = first + bytes(CHUNK - 5) + second + last
    file = file_name(0)
    regions = [
        region("r0", first, file, 0), region("r1", second, file, 2 * CHUNK), region("r2", last, file, 3 * CHUNK),
    ]  # fmt: skip
    other = region("r3", b"d", file_name(1), 0)
    found = sorted(join_regions([regions[2], other, regions[0], regions[1]]), key=lambda one: one.name)
    assert found == [entry(file, whole), entry(file_name(1), b"d")]


def test_regions_that_leave_a_gap_or_have_other_chunks_are_refused() -> None:
    file = file_name(0)
    first = region("r0", b"a", file, 0)
    with pytest.raises(ValueError, match=r"^__node0.distcp: r1 does not begin where the region before it ends$"):
        join_regions([first, region("r1", b"b", file, 2 * CHUNK)])
    odd = replace(
        region("r1", b"b", file, CHUNK), entry=FileEntry(name="r1", size=1, chunks=("0" * 32,), chunk_size=64)
    )
    with pytest.raises(ValueError, match="r1 does not begin"):
        join_regions([first, odd])
