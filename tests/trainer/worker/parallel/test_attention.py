"""Attention over shared sequences is that of one rank, with its gradients, the same bits each time."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multi

RANKS = Path(__file__).parent / "attention_ranks.py"
SHAPES = {
    "as many keys": (32, 4, 4),
    "fewer keys than ranks": (32, 4, 1),
    "keys that do not divide": (30, 12, 3),
    "odd length": (29, 4, 2),
    "shorter than its padding": (3, 4, 4),
}
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2}


@cache
def found(ranks: int) -> dict[tuple[str, str, str], Any]:
    """What each of so many ranks found, twice, by shape, method and type."""
    keys = [(shape, method, dtype) for shape in SHAPES for method in ("ulysses", "ring") for dtype in BOUNDS]
    cases = [{"shape": SHAPES[shape], "method": method, "dtype": dtype} for shape, method, dtype in keys]
    command = [sys.executable, str(RANKS), str(ranks), json.dumps(cases)]
    root = str(RANKS.parents[4])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return {key: [rank[at] for rank in told] for at, key in enumerate(keys)}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_outputs_and_gradients_are_those_of_one_rank(shape: str, dtype: str, method: str, ranks: int) -> None:
    for first, again in found(ranks)[shape, method, dtype]:
        assert max(first["differences"].values()) < BOUNDS[dtype], first
        assert again["bits"] == first["bits"]
