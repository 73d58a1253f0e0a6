"""Random generators continue where they were packed, and rows record their origin."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.warm_programs import WarmPrograms
from trainer.worker.data import mix
from trainer.worker.saved_state.rng_state import (
    _parts,
    generators_fault,
    origin_fault,
    pack_rng,
    rng_name,
    seed_by_data,
    seed_generators,
    set_origin,
    unpack_rng,
)

INTEROP = Path(__file__).resolve().parents[4] / ".venv" / "interop"


@pytest.fixture(scope="module")
def with_numpy(programs: WarmPrograms) -> dict[str, dict[str, Any]]:
    if not (INTEROP / ".ready").exists():
        pytest.skip("NumPy is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    found: dict[str, dict[str, Any]]
    (found,) = programs.results("tests.trainer.worker.saved_state.numpy_program", [(INTEROP,)])
    return found


def test_every_kind_of_numpys_generator_is_seeded_and_restored(with_numpy: dict[str, dict[str, Any]]) -> None:
    found = with_numpy["others"]
    assert found.pop("large") == "the state of NumPy's Large is too large to be saved"
    assert found.pop("unknown") == (
        "the checkpoint has the state of a NumPy PCG64: use set_bit_generator() in build_data()"
    )
    assert len(found) == 5
    for one in found.values():
        assert one["fault"] == ""
        assert one["restored"] == [one["next"]] * 2
        assert one["seeded"][0] == one["seeded"][1] != one["seeded"][2]


def test_numpys_generator_is_seeded_and_restored_with_the_others(with_numpy: dict[str, dict[str, Any]]) -> None:
    found = with_numpy["seeded"]
    assert found["once"] == found["again"]
    assert found["next"] == found["restored"]
    for ours, other in zip(found["once"], found["other"], strict=True):
        assert ours != other


def test_without_numpy_the_others_are_seeded():
    drawn = []
    for _ in range(2):
        seed_generators(9)
        drawn.append((torch.rand(()).item(), random.random()))
    assert drawn[0] == drawn[1]


def test_generators_go_on_where_they_were_packed():
    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)  # leaves half a pair behind, which belongs to the state
    packed = pack_rng(torch.device("cpu"))
    expected = (torch.rand(3), random.random(), random.gauss(0, 1))
    torch.manual_seed(6)
    random.seed(6)
    unpack_rng(packed, torch.device("cpu"))
    found = (torch.rand(3), random.random(), random.gauss(0, 1))
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_a_row_with_an_origin_is_as_long_and_gives_the_same_generators():
    torch.manual_seed(5)
    random.seed(5)
    packed = pack_rng(torch.device("cpu"))
    marked = packed.clone()
    set_origin(marked, 3, 40)
    assert marked.shape == packed.shape
    assert generators_fault(marked) == ""
    expected = (torch.rand(3), random.random())
    unpack_rng(marked, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_the_row_of_another_rank_or_step_is_told():
    packed = pack_rng(torch.device("cpu"))
    assert origin_fault(packed, rng_name(3), 40) == "does not record its rank and step"
    set_origin(packed, 3, 40)
    assert origin_fault(packed, rng_name(3), 40) == ""
    assert origin_fault(packed, rng_name(2), 40) == "is the state of rank 3 at step 40, in a checkpoint of step 40"
    assert origin_fault(packed, rng_name(3), 50) == "is the state of rank 3 at step 40, in a checkpoint of step 50"
    length = (packed == 16).nonzero()[-1]
    packed[length] = 8
    assert origin_fault(packed, rng_name(3), 40) == "does not record its rank and step"


def first_draw(*, seed: int, dp_rank: int, step: int) -> float:
    seed_by_data(seed, dp_rank, step)
    return float(torch.rand(1, dtype=torch.float64))


def test_a_rank_that_comes_later_draws_what_no_other_one_draws_and_the_same_in_every_run() -> None:
    cases = [(seed, rank, step) for seed in (1, 2) for rank in range(8) for step in (0, 1, 40, 4000)]
    drawn = [first_draw(seed=seed, dp_rank=rank, step=step) for seed, rank, step in cases]
    assert len(set(drawn)) == len(cases)
    assert drawn == [first_draw(seed=seed, dp_rank=rank, step=step) for seed, rank, step in cases]


def test_numbers_of_numpy_in_a_state_come_back_as_they_were(with_numpy: dict[str, dict[str, Any]]) -> None:
    assert with_numpy["numbers"] == {
        name: [True, True, name != "complex64"] for name in ("float64", "float32", "int64", "complex64", "float16")
    }


def test_a_row_may_end_after_its_last_part_or_a_few_bytes_later() -> None:
    packed = pack_rng(torch.device("cpu"))
    end = sum(8 + len(part) for part in _parts(packed))
    for more in range(9):
        assert generators_fault(packed[: end + more]) == ""
    assert "ends before" in generators_fault(packed[: end - 1])


def test_the_seeds_of_a_rank_are_the_same_in_every_release() -> None:
    for token_rank, step, due in (
        (0, 0, 7_000_021), (3, 0, 7_000_024), (3, 40, mix(7_000_024 ^ mix(40)) >> 1), (2**61, 0, 7_000_021 + 2**61),
        (2**63, 0, 7_000_021),
    ):  # fmt: skip
        seed_by_data(7, token_rank, step)
        assert torch.initial_seed() == due
