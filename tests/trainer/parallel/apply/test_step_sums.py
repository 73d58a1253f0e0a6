"""Sums of a step over real gloo ranks."""

from typing import Any

import pytest

from tests.trainer.worker import forked_ranks
from tests.warm_programs import WarmPrograms

pytestmark = pytest.mark.multi
RANKS = 3
CASES = {
    "short": {"length": 22, "steps": [7] * RANKS},
    "long": {"length": 30_000, "steps": [7] * RANKS},
    "another step": {"length": 22, "steps": [7, 7, 8]},
}


@pytest.fixture(scope="module")
def found(programs: WarmPrograms) -> dict[str, list[Any]]:
    told = forked_ranks.found(programs, "tests.trainer.parallel.apply.step_sums_ranks", RANKS, list(CASES.values()))
    return {case: [result for (result,) in of_ranks] for case, of_ranks in zip(CASES, told, strict=True)}


@pytest.mark.parametrize(("case", "length"), [("short", 22), ("long", 30_000)])
def test_every_rank_has_the_same_bits_of_the_sum(found: dict[str, list[Any]], case: str, length: int) -> None:
    first, *others = found[case]
    assert all(other == first for other in others)
    numbers = [float.fromhex(one) for one in first]
    assert numbers == pytest.approx([RANKS * 0.1 * place + 1.0 for place in range(length)], rel=1e-12)


def test_the_row_of_another_step_is_not_added(found: dict[str, list[Any]]) -> None:
    lone = found["another step"]
    assert "step 7: the data from rank 2 does not belong to this step" in lone[0]
    assert lone[1] == lone[0]
    assert "step 8: the data from rank 0, 1 does not belong to this step" in lone[2]
