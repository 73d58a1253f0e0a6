"""Frames laid around values are what torch.save writes, byte for byte."""

import io
import resource

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from checkpointing.engine.state import layout
from checkpointing.engine.state.layout import ALIGNMENT, RecordFormatError, template

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
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(tensor, stream)
    finally:
        set_crc32_options(before)
    data = stream.getvalue()
    assert data.startswith(around.head)
    assert data.endswith(around.tail)
    assert len(data) == around.length


def test_a_huge_tensor_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    around = template(torch.bfloat16, (1 << 19, 1 << 20))
    assert around.nbytes == 1 << 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_of_torch_is_as_it_was(wanted: bool) -> None:
    before = get_crc32_options()
    set_crc32_options(wanted)
    try:
        template.cache_clear()
        template(torch.float32, (3, 3))
        assert get_crc32_options() is wanted
    finally:
        set_crc32_options(before)


def test_a_torch_whose_frames_depend_on_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
