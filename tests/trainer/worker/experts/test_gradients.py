"""Gradients of a model whose experts several ranks share are those of one rank, the same bits each time."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multi

RANKS = Path(__file__).parent / "gradient_ranks.py"
RECOMPUTED = {"activation_checkpointing": True}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "2": {
        "ep 2": {"parallel": {"ep": 2}},
        "ep 2, micro-batches recomputed": {"parallel": {"ep": 2}, "train": RECOMPUTED, "micro": 4},
    },
    "2, more": {
        "ep 1": {"parallel": {}},
        "ep 1, products kept": {"parallel": {}, "train": {**RECOMPUTED, "recompute": {"keep": "products"}}},
        "ep 2, reduced once": {"parallel": {"ep": 2, "strategy": "zero1"}, "micro": 2},
        "ep 2 of cp 2": {"parallel": {"ep": 2, "cp": 2, "cp_method": "ulysses"}},
        "ep 1 of ring 2": {"parallel": {"cp": 2, "cp_method": "ring"}},
    },
    "4": {
        "ep 4": {"parallel": {"ep": 4}},
        "ep 2 x fsdp 2": {"parallel": {"ep": 2}},
        "ep 2 in hsdp 2 x 2": {"parallel": {"ep": 2, "strategy": "hsdp", "dp_replicate": 2}},
        "ep 2 x cp 2": {"parallel": {"ep": 2, "cp": 2, "cp_method": "ulysses"}},
        "ep 4 of ring 2": {"parallel": {"ep": 4, "cp": 2, "cp_method": "ring"}},
        "ep 2 x fsdp 2, recomputed": {"parallel": {"ep": 2}, "train": RECOMPUTED},
    },
}
"""By the number of ranks that forks them, and which of them are a sample of all."""
BOUND = 2e-5
"""Sums in another order, in float32."""


@cache
def found(ranks: str) -> dict[str, Any]:
    """What each of so many ranks found, twice, by case."""
    command = [sys.executable, str(RANKS), ranks[0], json.dumps(list(CASES[ranks].values()))]
    root = str(RANKS.parents[4])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return {name: [rank[at] for rank in told] for at, name in enumerate(CASES[ranks])}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if ranks == "2" else pytest.mark.proof)
        for ranks, cases in CASES.items()
        for name in cases
    ],
)
def test_gradients_and_loads_are_those_of_one_rank(ranks: str, name: str) -> None:
    for first, again in found(ranks)[name]:
        assert max(first["differences"].values()) < BOUND, first["differences"]
        assert first["load"] == first["load of one rank"]
        assert again["bits"] == first["bits"]
    popular, *_, unused = found(ranks)[name][0][0]["load"][:8]
    assert unused == 0
    assert popular == 8 * 13  # every token of the batch
