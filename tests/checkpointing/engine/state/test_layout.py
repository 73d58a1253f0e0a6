"""Where tensors lie: aligned, without overlap, equal ones at a constant distance, split when a window is small."""

import io
import math
import random
import resource
from itertools import pairwise

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from checkpointing.engine.state import layout
from checkpointing.engine.state.layout import (
    ALIGNMENT,
    FileLayout,
    RecordFormatError,
    Share,
    lay_out,
    lay_out_in_buckets,
    split,
    template,
)
from checkpointing.storage.shared_memory import PAGE


def share(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Share:
    return Share(key, dtype, shape, (0,) * len(shape), shape, (0,) * len(shape))


def some_shares(seed: int) -> list[Share]:
    draw = random.Random(seed)
    types = [torch.float32, torch.bfloat16, torch.bool, torch.int64]
    return [
        share(f"t{n}", *(draw.choice([0, 1, 3, 17, 64]) for _ in range(draw.randrange(4))), dtype=draw.choice(types))
        for n in range(60)
    ]


def check(layout: FileLayout) -> None:
    for part in layout.parts:
        spans = {name: (offset, size) for name, offset, size in part.files}
        ends = sorted((offset, offset + size) for offset, size in spans.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(offset % PAGE == size % PAGE == 0 for offset, size in spans.values())
        records = []
        for item in part.items:
            offset, size = spans[item.piece.file]
            assert item.place == offset + item.piece.data
            assert item.place % 64 == 0
            assert item.piece.start + item.piece.length <= size
            records.append((offset + item.piece.start, offset + item.piece.start + item.piece.length))
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(records)))


@pytest.mark.parametrize("files", [1, 2, 5, 64])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tensors_are_aligned_and_do_not_overlap(files: int, seed: int) -> None:
    shares = some_shares(seed)
    layout = lay_out(shares, 3, files)
    check(layout)
    assert sorted(item.key for item in layout.items) == sorted(each.key for each in shares)
    names = [name for name, _, _ in layout.files]
    assert names == sorted(set(names), key=names.index)
    assert all(name.startswith("__3_") for name in names)
    assert 1 <= len(names) <= files


def test_files_are_of_about_the_same_size() -> None:
    layout = lay_out([share(f"t{n}", 100, 100) for n in range(64)], 0, 4)
    sizes = [size for _, _, size in layout.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)


def test_equal_tensors_are_at_a_constant_distance() -> None:
    shares = [share(f"a{n}", 16, 8) if n % 2 else share(f"b{n}", 4) for n in range(20)]
    items = [item for item in lay_out(shares, 0, 1).items if item.shape == (16, 8)]
    assert len({right.place - left.place for left, right in pairwise(items)}) == 1


def test_a_rank_without_tensors_writes_no_file() -> None:
    layout = lay_out([], 0, 3)
    assert (layout.files, layout.items, layout.buffer_bytes) == ((), (), PAGE)
    assert len(lay_out_in_buckets([], 0, 1 << 16).parts) == 1


@pytest.mark.parametrize("shape", [(100_000,), (3, 50_000), (1, 1, 70_000), (300, 300), (2, 2, 40_000)])
def test_tensors_larger_than_a_window_are_split_without_gaps(shape: tuple[int, ...]) -> None:
    window = 1 << 16
    pieces = list(split(share("big", *shape), window))
    assert len(pieces) > 1
    assert all(piece.template.length <= window for piece in pieces)
    seen = torch.zeros(shape, dtype=torch.int32)
    for piece in pieces:
        region = seen
        for axis, (start, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
            region = region.narrow(axis, start, length)
        region += 1
        assert piece.within == piece.offsets
    assert bool((seen == 1).all())


@pytest.mark.parametrize("seed", [1, 2])
def test_buckets_hold_everything_and_fit_their_window(seed: int) -> None:
    shares = [*some_shares(seed), share("big", 200, 300)]
    layout = lay_out_in_buckets(shares, 0, 1 << 16)
    check(layout)
    assert len(layout.parts) > 1
    assert layout.buffer_bytes <= 1 << 16
    assert sum(math.prod(item.shape) for item in layout.items) == sum(math.prod(each.shape) for each in shares)
    assert len({name for name, _, _ in layout.files}) == len(layout.parts)


TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64, torch.complex64]
SHAPES: list[tuple[int, ...]] = [(), (5,), (0, 4), (3, 4, 5), (300, 400)]


@pytest.mark.parametrize("dtype", [*TYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_frame_with_values_is_a_file_that_torch_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numel = torch.zeros(shape).numel()
    values = (torch.arange(numel * dtype.itemsize) % 2).to(torch.uint8)
    around = template(dtype, shape)
    assert (around.nbytes, len(around.head) % ALIGNMENT) == (len(values), 0)
    loaded = torch.load(io.BytesIO(around.head + bytes(values.tolist()) + around.tail), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
    assert torch.equal(loaded.reshape(-1).view(torch.uint8) if numel else loaded.view(torch.uint8).reshape(-1), values)


def test_a_large_frame_is_what_torch_writes_around_real_values() -> None:
    tensor = torch.full((300, 400), 0.5)
    around = template(torch.float32, (300, 400))
    data = layout._save_to_bytes(tensor)
    assert data.startswith(around.head)
    assert data.endswith(around.tail)
    assert len(data) == around.length


def test_the_layout_of_a_huge_tensor_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    around = template(torch.bfloat16, (1 << 19, 1 << 20))
    assert around.nbytes == 1 << 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_of_torch_is_restored(wanted: bool) -> None:
    before = get_crc32_options()
    set_crc32_options(wanted)
    try:
        template.cache_clear()
        template(torch.float32, (3, 3))
        assert get_crc32_options() is wanted
    finally:
        set_crc32_options(before)


def test_a_torch_whose_records_depend_on_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    true_saved = layout._save_to_bytes
    monkeypatch.setattr(layout, "_save_to_bytes", lambda tensor: true_saved(tensor) + bytes([bool(tensor.any())]))
    template.cache_clear()
    with pytest.raises(RecordFormatError, match="depend on its values"):
        template(torch.float32, (4,))


def test_a_torch_with_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    true_saved = layout._save_to_bytes
    monkeypatch.setattr(layout, "_save_to_bytes", lambda tensor: b"\0" + true_saved(tensor))
    template.cache_clear()
    with pytest.raises(RecordFormatError):
        template(torch.float32, (4,))
