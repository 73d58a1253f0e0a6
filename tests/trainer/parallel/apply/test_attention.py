"""Attention over shared sequences equals that of one rank, with the same bits each time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.worker import forked_ranks
from tests.warm_programs import WarmPrograms

pytestmark = pytest.mark.multi

RANKS = "tests.trainer.parallel.apply.attention_ranks"
SHAPES = {
    "as many keys": (32, 4, 4),
    "fewer keys than ranks": (32, 4, 1),
    "keys that do not divide": (30, 12, 3),
    "odd length": (29, 4, 2),
    "shorter than its padding": (3, 4, 4),
}
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2}
Results = dict[tuple[str, str, str], Any]


@pytest.fixture(scope="module")
def found(programs: WarmPrograms) -> Callable[[int], Results]:
    keys = [(shape, method, dtype) for shape in SHAPES for method in ("ulysses", "ring") for dtype in BOUNDS]
    cases = [{"shape": SHAPES[shape], "method": method, "dtype": dtype} for shape, method, dtype in keys]
    results: dict[int, Results] = {}

    def get(ranks: int) -> Results:
        if ranks not in results:
            results[ranks] = dict(zip(keys, forked_ranks.found(programs, RANKS, ranks, cases), strict=True))
        return results[ranks]

    return get


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_outputs_and_gradients_are_those_of_one_rank(
    found: Callable[[int], Results], shape: str, dtype: str, method: str, ranks: int
) -> None:
    for first, again in found(ranks)[shape, method, dtype]:
        assert max(first["differences"].values()) < BOUNDS[dtype], first
        assert again["bits"] == first["bits"]
