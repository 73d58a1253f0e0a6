"""Sums of a step over real gloo ranks."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.multi
RANKS = 3


def found(**case: Any) -> list[Any]:
    """By rank."""
    words = [sys.executable, "-m", "tests.trainer.worker.parallel.step_sums_ranks", str(RANKS), json.dumps([case])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    return [results[0][0] for results in json.loads(done.stdout)]


@pytest.mark.parametrize("length", [22, 30_000])
def test_every_rank_has_the_same_bits_of_the_sum(length: int) -> None:
    """The long row is reduced, and not gathered."""
    first, *others = found(length=length, steps=[7] * RANKS)
    assert all(other == first for other in others)
    numbers = [float.fromhex(one) for one in first]
    assert numbers == pytest.approx([RANKS * 0.1 * place + 1.0 for place in range(length)], rel=1e-12)


def test_the_row_of_another_step_is_not_added() -> None:
    lone = found(length=22, steps=[7, 7, 8])
    assert "step 7: what came from rank 2 is not the numbers of this step" in lone[0]
    assert lone[1] == lone[0]
    assert "step 8: what came from rank 0, 1 is not the numbers of this step" in lone[2]
