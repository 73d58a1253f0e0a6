"""Fingerprints: independent of how a tensor was cut, and different for different values."""

import random

import pytest
import torch

from checkpointing.engine.state import fingerprints
from checkpointing.engine.state.fingerprints import combine, fingerprint, partial, word_type

TYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.complex64
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (5,), (0, 3), (7, 5), (3, 4, 5), (2, 1, 6, 3)]


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    count = torch.zeros(shape).numel() * dtype.itemsize
    most = 2 if dtype == torch.bool else 256
    return torch.randint(0, most, (count,), generator=draw, dtype=torch.uint8).view(dtype).reshape(shape)


def plainly(tensor: torch.Tensor) -> str:
    """The definition, with Python's own integers."""
    if not tensor.numel():
        return "0" * 16
    rows = tensor.shape[0] if tensor.dim() else 1
    words = tensor.contiguous().reshape(-1).view(word_type(tensor.dtype)).reshape(rows, -1).tolist()
    a = fingerprints._weights(torch.arange(rows), fingerprints._ROW_SEED).tolist()
    b = fingerprints._weights(torch.arange(len(words[0])), fingerprints._COLUMN_SEED).tolist()
    by_row = sum(weight * sum(row) for weight, row in zip(a, words, strict=True))
    by_column = sum(weight * sum(column) for weight, column in zip(b, zip(*words, strict=True), strict=True))
    return f"{by_row % 2**32:08x}{by_column % 2**32:08x}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fingerprint_matches_its_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, shape)
    assert fingerprint(tensor) == plainly(tensor)


def test_an_even_number_of_changed_signs_is_seen_only_in_short_floats() -> None:
    """The limit that is written down for them: nothing may be promised beyond it."""
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    assert fingerprint(-tensor) == fingerprint(tensor)
    assert fingerprint(-tensor.bfloat16()) != fingerprint(tensor.bfloat16())
    tensor[0, 0] *= -1
    odd = fingerprint(tensor)
    tensor[0, 0] *= -1
    assert odd != fingerprint(tensor)


@pytest.mark.parametrize("shape", [(300_000,), (3, 300_000), (400_000, 2)], ids=str)
def test_long_ranges_are_cut_into_slices_that_add_up(shape: tuple[int, ...]) -> None:
    tensor = values(torch.int32, shape)
    assert fingerprint(tensor) == plainly(tensor)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_grid_of_shards_adds_up_to_the_whole(dtype: torch.dtype) -> None:
    draw, shape = random.Random(3), (9, 6, 8)
    tensor = values(dtype, shape)
    for _ in range(10):
        cuts = [sorted(draw.sample(range(1, length), 2)) for length in shape]
        bounds = [list(zip([0, *cut], [*cut, length], strict=True)) for cut, length in zip(cuts, shape, strict=True)]
        parts = [
            partial(tensor[x0:x1, y0:y1, z0:z1], (x0, y0, z0), shape)
            for x0, x1 in bounds[0] for y0, y1 in bounds[1] for z0, z1 in bounds[2]
        ]  # fmt: skip
        assert combine(parts) == fingerprint(tensor)


def test_every_flipped_bit_and_every_exchange_changes_it() -> None:
    tensor = values(torch.float32, (6, 5))
    known = fingerprint(tensor)
    words = tensor.view(torch.int32)
    for place in range(30):
        for bit in (0, 7, 22, 31):
            words.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
            assert fingerprint(tensor) != known
            words.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert fingerprint(tensor) == known
    assert fingerprint(tensor.flip(0)) != known
    assert fingerprint(tensor.flip(1)) != known
    assert fingerprint(tensor.t()) != known


def test_memory_order_and_autograd_do_not_matter() -> None:
    tensor = values(torch.int32, (6, 5)).to(torch.float32)
    known = fingerprint(tensor)
    assert fingerprint(tensor.t().contiguous().t()) == known
    assert fingerprint(torch.nn.Parameter(tensor)) == known
