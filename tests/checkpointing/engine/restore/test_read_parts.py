"""Which bytes a rank needs, which rank reads them and where they land."""

import io
import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.restore.loader import assign
from checkpointing.engine.restore.metadata_reader import VerifiedFile
from checkpointing.engine.restore.read_buffers import ChunkReader, ReadBuffers
from checkpointing.engine.restore.source import NO_OPTIMIZER_STATE, OptionalKeys, local_box, number_chunks
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import FileEntry, Piece
from checkpointing.format.read_plan import Box, Shard, Slice, before, intersect, overlaps, parts, strips
from checkpointing.format.torch_record import read_record
from checkpointing.storage.shared_memory import PAGE

SEED = 41


def piece(sizes: tuple[int, ...], offsets: tuple[int, ...] | None = None, data: int = 100) -> Piece:
    count = 1
    for size in sizes:
        count *= size
    return Piece("x", "f", offsets or (0,) * len(sizes), sizes, data, count * 4, data, count * 4)


def drawn_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw.randrange(size) for size in shape)
    sizes = tuple(draw.randint(1, size - start) for start, size in zip(starts, shape, strict=True))
    return Box(starts, sizes)


# ---- what is needed


@pytest.mark.parametrize("seed", range(60))
def test_the_strips_of_a_box_are_its_bytes_in_order(seed: int) -> None:
    draw = random.Random(SEED + seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    saved, wanted = drawn_box(draw, shape), drawn_box(draw, shape)
    need = intersect(piece(saved.sizes, saved.offsets), 0, wanted)
    cells = set(itertools.product(*map(lambda a, n: range(a, a + n), saved.offsets, saved.sizes)))
    both = sorted(cells & set(itertools.product(*map(lambda a, n: range(a, a + n), wanted.offsets, wanted.sizes))))
    if not both:
        assert need is None
        return
    assert need is not None
    expected = []
    for cell in both:
        at = 0
        for place, start, size in zip(cell, saved.offsets, saved.sizes, strict=True):
            at = at * size + place - start
        expected += range(100 + 4 * at, 104 + 4 * at)
    rows = strips(saved.sizes, need, 4, 100)
    found = [
        strip.offset + row * strip.stride + byte
        for strip in rows
        for row in range(strip.repeats)
        for byte in range(strip.length)
    ]
    assert found == expected
    for place in range(90, 100 + 4 * 5**4, 7):
        assert before(rows, place) == sum(byte < place for byte in expected)
    goal = [start + place - here for start, place, here in zip(saved.offsets, need.source, wanted.offsets, strict=True)]
    assert tuple(goal) == need.goal


@pytest.mark.parametrize("seed", range(20))
def test_a_need_is_cut_at_the_chunks(seed: int) -> None:
    draw = random.Random(SEED + seed)
    shape = (draw.randint(1, 9), draw.randint(1, 9))
    box = drawn_box(draw, shape)
    rows = strips(shape, Slice("x", 0, box.offsets, box.offsets, box.sizes), 4, 100)
    shard = Shard("f", 100 + 4 * shape[0] * shape[1], draw.randint(5, 60), None, 3)
    found = list(parts(rows, shard))
    assert [part.low for part in found] == [0, *(part.high for part in found[:-1])]
    assert found[-1].high == 4 * box.volume
    for part in found:
        start, end = shard.span(part.chunk)
        assert before(rows, start) == part.low
        assert before(rows, end) == part.high


def test_whole_pieces_and_rows_are_one_contiguous_range() -> None:
    whole = strips((6, 8), Slice("x", 0, (0, 0), (0, 0), (6, 8)), 4, 64)
    rows = strips((6, 8), Slice("x", 0, (2, 0), (0, 0), (3, 8)), 4, 64)
    columns = strips((6, 8), Slice("x", 0, (0, 4), (0, 0), (6, 4)), 4, 64)
    assert [(strip.offset, strip.nbytes) for strip in whole] == [(64, 192)]
    assert [(strip.offset, strip.nbytes) for strip in rows] == [(128, 96)]
    assert [(strip.offset, strip.repeats, strip.stride, strip.length) for strip in columns] == [(80, 6, 32, 16)]


@pytest.mark.parametrize("seed", range(40))
def test_boxes_that_share_a_value_are_found(seed: int) -> None:
    draw = random.Random(SEED + seed)
    boxes = [drawn_box(draw, (6, 6)) for _ in range(draw.randint(0, 4))]
    cells = [
        set(
            itertools.product(
                range(b.offsets[0], b.offsets[0] + b.sizes[0]), range(b.offsets[1], b.offsets[1] + b.sizes[1])
            )
        )
        for b in boxes
    ]
    assert any(overlaps(boxes)) == any(one & other for one, other in itertools.combinations(cells, 2))


def test_scalars_and_empty_tensors() -> None:
    assert intersect(piece(()), 0, Box((), ())) == Slice("x", 0, (), (), ())
    assert intersect(piece((0, 4)), 0, Box((0, 0), (0, 4))) is None
    assert any(overlaps([Box((), ()), Box((), ())]))
    assert local_box(torch.zeros(3, 2)) == Box((0, 0), (3, 2))


# ---- who reads


def shards(*sizes: int, chunk: int = 10) -> tuple[Shard, ...]:
    return number_chunks((f"f{number}", size, chunk, None) for number, size in enumerate(sizes))


EVERYWHERE = {"f0", "f1", "f2", "f3"}


def test_the_same_layout_needs_no_exchange() -> None:
    readers = assign(shards(30, 30), [{0: 9, 1: 10, 2: 4}, {3: 9, 4: 10, 5: 4}], [EVERYWHERE] * 2)
    assert readers == [(0,), (0,), (0,), (1,), (1,), (1,)]


def test_replicated_bytes_are_read_once_and_evenly() -> None:
    readers = assign(shards(80), [{chunk: 10 for chunk in range(8)}] * 4, [EVERYWHERE] * 4)
    assert all(len(reading) == 1 for reading in readers)
    assert sorted(reader for (reader,) in readers) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_two_replicas_read_for_themselves() -> None:
    assert assign(shards(20), [{0: 10, 1: 9}] * 2, [EVERYWHERE] * 2) == [(0, 1), (0, 1)]
    assert assign(shards(20), [{0: 5, 1: 5}] * 2, [EVERYWHERE] * 2) == [(0,), (1,)], "halves are sent"


def test_the_rank_that_needs_most_reads_and_unneeded_bytes_are_read_too() -> None:
    readers = assign(shards(30), [{0: 2, 1: 10}, {0: 7}], [EVERYWHERE] * 2)
    assert readers[:2] == [(1,), (0,)]
    assert len(readers[2]) == 1


def test_only_a_rank_that_has_the_file_reads_it() -> None:
    assert assign(shards(10, 10), [{0: 10}, {1: 10}], [{"f1"}, {"f0"}]) == [(1,), (0,)]


# ---- how it lands


def on_disk(folder: Path, size: int, chunk: int) -> tuple[bytes, tuple[Shard, ...]]:
    data = random.Random(size).randbytes(size)
    (folder / "f").write_bytes(data)
    return data, number_chunks([("f", size, chunk, FileEntry.from_bytes("f", data, chunk).chunks)])


def reader(folder: Path, files: tuple[Shard, ...], open_file: Any = None) -> ChunkReader:
    return ChunkReader("x", files, open_file or (lambda name: (folder / name).open("rb")), patience=0, pause=0)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("size", [1, 4095, 4096, 70_000, 300_001])
@pytest.mark.parametrize("chunk", [8192, 10_000])
def test_chunks_land_where_they_belong(tmp_path: Path, size: int, chunk: int, warm: bool) -> None:
    data, files = on_disk(tmp_path, size, chunk)
    if not warm:
        descriptor = os.open(tmp_path / "f", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    numbers = [number for number in range(files[0].count) if number % 3 != 1]
    buffers = ReadBuffers.allocate(files, numbers, lambda _: [])
    made = reader(tmp_path, files)
    made.read(numbers, buffers)
    assert made.bytes_read == sum(end - start for start, end in map(files[0].span, numbers))
    for number in numbers:
        start, end = files[0].span(number)
        assert buffers.memory(files[0], number)[0] == data[start:end]
    assert buffers.holds(range(2, 4)) == (files[0].count > 3)
    assert not buffers.holds(range(0, 2))


def test_lent_memory_is_used_as_far_as_it_reaches(tmp_path: Path) -> None:
    data, files = on_disk(tmp_path, 5 * PAGE, PAGE)
    room = memoryview(bytearray(3 * PAGE))
    buffers = ReadBuffers.allocate(files, [0, 2, 3, 4], lambda size: [room])
    reader(tmp_path, files).read([0, 2, 3, 4], buffers)
    assert room == data[2 * PAGE :], "the longest run of chunks comes first"
    assert buffers.memory(files[0], 0)[0] == data[:PAGE]


def test_streams_without_a_descriptor_are_read_too(tmp_path: Path) -> None:
    data, files = on_disk(tmp_path, 50_000, 8192)
    buffers = ReadBuffers.allocate(files, range(7), lambda _: [])
    reader(tmp_path, files, lambda name: io.BytesIO(data)).read(range(7), buffers)
    assert b"".join(bytes(buffers.memory(files[0], number)[0]) for number in range(7)) == data


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:20_000] + b"?" + data[20_001:], "f chunk 2: digest differs"),
        (lambda data: data[:-1], "f chunk 6: ends too early"),
        (lambda data: data[:8192] + bytes(8192) + data[16384:], "f chunk 1: digest differs"),
    ],
)
def test_other_bytes_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    data, files = on_disk(tmp_path, 50_000, 8192)
    (tmp_path / "f").write_bytes(change(data))
    with pytest.raises(CheckpointRefused, match=reason):
        reader(tmp_path, files).read(range(7), ReadBuffers.allocate(files, range(7), lambda _: []))


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    data, files = on_disk(tmp_path, 100, 8192)
    missing = iter([True, True, False])

    def open_file(name: str) -> Any:
        if next(missing):
            raise FileNotFoundError(name)
        return (tmp_path / name).open("rb")

    buffers = ReadBuffers.allocate(files, [0], lambda _: [])
    ChunkReader("x", files, open_file, patience=20, pause=0).read([0], buffers)
    assert buffers.memory(files[0], 0)[0] == data
    with pytest.raises(CheckpointRefused, match="f: unreadable"):
        ChunkReader("x", files, lambda name: (tmp_path / "gone").open("rb"), patience=0, pause=0).read([0], buffers)


def test_ranges_over_chunks_are_verified() -> None:
    data = random.Random(1).randbytes(1000)
    entry = FileEntry.from_bytes("f", data, 300)
    verified = VerifiedFile(io.BytesIO(data), entry, "x")
    assert verified.read(250, 700) == data[250:950]
    with pytest.raises(CheckpointRefused, match="has no bytes 900..1001"):
        verified.read(900, 101)
    with pytest.raises(CheckpointRefused, match="f chunk 1: digest differs"):
        VerifiedFile(io.BytesIO(data[:400] + b"??" + data[402:]), entry, "x").read(290, 20)


@pytest.mark.parametrize("checksums", [True, False])
def test_values_are_found_by_the_headers_alone(checksums: bool) -> None:
    before_it = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        for shape in ((), (0,), (3, 4), (5000,)):
            stream = io.BytesIO(b"x" * 77)
            stream.seek(77)
            tensor = torch.rand(shape)
            torch.save(tensor, stream)
            data = stream.getvalue()
            record = read_record(lambda at, n, data=data: data[at : at + n], 77, len(data) - 77)
            assert data[77 + record.data :][: record.nbytes] == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    finally:
        torch.serialization.set_crc32_options(before_it)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(100), bytes(1000)])
def test_what_is_no_archive_has_no_values(data: bytes) -> None:
    with pytest.raises(ValueError, match="BadZipFile"):
        read_record(lambda at, n: data[at : at + n], 0, len(data))


@pytest.mark.parametrize(
    ("wanted", "lost"),
    [
        ([{"model/a", "model/b", "rng/0"}], []),
        # Stages of a pipeline have other tensors; only what no rank wants is lost.
        ([{"model/a"}, {"model/b"}], []),
        ([{"model/a"}, {"model/a"}], ["model/b"]),
        ([set(), set()], ["model/a", "model/b"]),
    ],
)
def test_what_no_rank_wants_of_a_checkpoint_is_found(wanted: list[set[str]], lost: list[str]) -> None:
    keys = OptionalKeys(complete=("model/", "optimizer/"))
    known = ["rng/0", "model/b", "model/a", NO_OPTIMIZER_STATE]
    assert keys.lost([keys.surplus(each, known) for each in wanted], known) == lost
    anything = OptionalKeys()
    assert anything.lost([anything.surplus(set(), known)], known) == []
