"""Gradients of shared experts equal those of one rank, with the same bits each time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.worker import forked_ranks
from tests.warm_programs import WarmPrograms

pytestmark = pytest.mark.multi

RANKS = "tests.trainer.parallel.apply.gradient_ranks"
SCHEDULES = {"1f1b": 2, "interleaved_1f1b": 4, "interleaved_zero_bubble": 4, "zbv": 4}
EVEN = {"seq_len": 14}
"""Tensor-parallel ranks share the sequence."""
RECOMPUTED = {"activation_checkpointing": True}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "2": {
        "ep 2": {"parallel": {"ep": 2, "fsdp": {"wrap": "Experts,Router"}}},
        "ep 2, micro-batches recomputed": {"parallel": {"ep": 2}, "train": RECOMPUTED, "micro": 2},
        # Once each: test_expert_strategies.py trains such ranks twice, and the last three are compared.
        "2 stages": {"parallel": {"pipeline": {"stages": 2}}, "times": 1},
        "ep 2 of tp 2, tied": {"parallel": {"tp": 2, "ep": 2}, "micro": 2, "train": EVEN, "tied": True, "times": 1},
        "ep 1": {"parallel": {}, "times": 1},
        "ep 1, by class": {"parallel": {"fsdp": {"wrap": "Block,Experts"}}, "times": 1},
        "ep 1, by size": {"parallel": {"fsdp": {"wrap": "3000"}}, "times": 1},
        "tp 2, other decoders": {"parallel": {"tp": 2}, "train": EVEN, "features": True},
        "tp 2, trained in part": {"parallel": {"tp": 2}, "train": EVEN, "masked": True, "times": 1},
        "ep 2, trained in part": {"parallel": {"ep": 2}, "micro": 2, "masked": True, "times": 1},
        "ring 2, trained in part": {"parallel": {"cp": 2, "cp_method": "ring"}, "masked": True, "times": 1},
        "ulysses 2, other decoders": {"parallel": {"cp": 2, "cp_method": "ulysses"}, "features": True, "times": 1},
    },
    "2, more": {
        "ep 2, by default": {"parallel": {"ep": 2}},
        "ep 2, other decoders": {"parallel": {"ep": 2}, "features": True},
        "2 stages, other decoders, recomputed": {
            "parallel": {"pipeline": {"stages": 2}},
            "features": True,
            "train": RECOMPUTED,
        },
        "ep 1, products kept": {"parallel": {}, "train": {**RECOMPUTED, "recompute": {"keep": "products"}}},
        "ep 2, reduced once": {"parallel": {"ep": 2, "strategy": "zero1"}, "micro": 2},
        "ep 2 of cp 2": {"parallel": {"ep": 2, "cp": 2, "cp_method": "ulysses"}},
        "ep 1 of ring 2": {"parallel": {"cp": 2, "cp_method": "ring"}},
        **{
            f"{schedule}, {stages} stages": {
                "parallel": {"pipeline": {"stages": stages, "schedule": schedule}},
                "layers": 5,
            }
            for schedule, stages in SCHEDULES.items()
        },
        "gpipe, plain replicas": {"parallel": {"pipeline": {"stages": 2, "schedule": "gpipe"}, "strategy": "ddp"}},
        "ep 1 of tp 2": {"parallel": {"tp": 2}, "micro": 2, "train": EVEN},
        "tp 2, plain replicas": {"parallel": {"tp": 2, "strategy": "ddp"}, "train": EVEN},
        "tp 2, recomputed": {"parallel": {"tp": 2}, "train": {**RECOMPUTED, **EVEN}},
        "tp 2, products kept": {
            "parallel": {"tp": 2},
            "train": {**RECOMPUTED, **EVEN, "recompute": {"keep": "products"}},
        },
        "2 stages, recomputed": {"parallel": {"pipeline": {"stages": 2}}, "train": RECOMPUTED},
        "2 stages, products kept": {
            "parallel": {"pipeline": {"stages": 2}},
            "train": {**RECOMPUTED, "recompute": {"keep": "products"}},
        },
    },
    "4": {
        "ep 4": {"parallel": {"ep": 4}},
        "ep 2 x fsdp 2": {"parallel": {"ep": 2}},
        "ep 2 in hsdp 2 x 2": {"parallel": {"ep": 2, "strategy": "hsdp", "dp_replicate": 2}},
        "ep 2 x cp 2": {"parallel": {"ep": 2, "cp": 2, "cp_method": "ulysses"}},
        "ep 4 of ring 2": {"parallel": {"ep": 4, "cp": 2, "cp_method": "ring"}},
        "ep 2 x fsdp 2, recomputed": {"parallel": {"ep": 2}, "train": RECOMPUTED},
        **{
            f"{schedule}, {stages} stages x ep 2": {
                "parallel": {"pipeline": {"stages": stages, "schedule": schedule}, "ep": 2},
                "layers": 5,
            }
            for schedule, stages in SCHEDULES.items()
        },
        "2 stages x fsdp 2": {"parallel": {"pipeline": {"stages": 2}}},
        "fsdp 2 x tp 2": {"parallel": {"tp": 2}, "train": EVEN},
        "fsdp 2 x tp 2, ep 2": {"parallel": {"tp": 2, "ep": 2}, "train": EVEN},
        "fsdp 2 x tp 2, ep 4": {"parallel": {"tp": 2, "ep": 4, "strategy": "zero1"}, "micro": 2, "train": EVEN},
        "ddp 2 x tp 2": {"parallel": {"tp": 2, "strategy": "ddp"}, "micro": 2, "train": EVEN},
        "hsdp 2 x 1 x tp 2, ep 2": {
            "parallel": {"tp": 2, "ep": 2, "strategy": "hsdp", "dp_replicate": 2},
            "train": EVEN,
        },
        "ring 2 x tp 2, ep 2": {"parallel": {"tp": 2, "ep": 2, "cp": 2, "cp_method": "ring"}, "train": EVEN},
        "zbv, 4 stages x tp 2, ep 2": {
            "parallel": {"tp": 2, "ep": 2, "pipeline": {"stages": 4, "schedule": "zbv"}},
            "layers": 5,
            "train": EVEN,
        },
        "2 stages x tp 2": {"parallel": {"tp": 2, "pipeline": {"stages": 2}}, "train": EVEN},
        "2 stages x plain replicas": {"parallel": {"pipeline": {"stages": 2}, "strategy": "ddp"}},
        "2 stages x ep 2 of cp 2": {"parallel": {"pipeline": {"stages": 2}, "ep": 2, "cp": 2}},
        "2 stages x ep 2, recomputed": {"parallel": {"pipeline": {"stages": 2}, "ep": 2}, "train": RECOMPUTED},
    },
    "8": {
        "2 stages x fsdp 2 x ep 2": {"parallel": {"pipeline": {"stages": 2}, "ep": 2}, "layers": 3},
        "zbv, 4 stages x hsdp 2 x ep 2": {
            "parallel": {
                "pipeline": {"stages": 4, "schedule": "zbv"},
                "strategy": "hsdp",
                "dp_replicate": 2,
                "ep": 2,
            },
            "layers": 4,
        },
    },
}
"""Cases by number of forked ranks, and the sample for the fast tests."""
BOUND = 2e-5
"""Tolerance for sums in another order, in float32."""


@pytest.fixture(scope="module")
def found(programs: WarmPrograms) -> Callable[[str], dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}

    def get(ranks: str) -> dict[str, Any]:
        if ranks not in results:
            told = forked_ranks.found(programs, RANKS, int(ranks[0]), list(CASES[ranks].values()))
            results[ranks] = dict(zip(CASES[ranks], told, strict=True))
        return results[ranks]

    return get


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if ranks == "2" else pytest.mark.proof)
        for ranks, cases in CASES.items()
        for name in cases
    ],
)
def test_gradients_and_loads_are_those_of_one_rank(
    found: Callable[[str], dict[str, Any]], ranks: str, name: str
) -> None:
    for first, *again in found(ranks)[name]:
        assert max(first["differences"].values()) < BOUND, first["differences"]
        assert first["load"] == first["load of one rank"]
        assert first["moves"] == first["moves of one rank"]
        assert {one["bits"] for one in again} <= {first["bits"]}
    names = {name for first, *_ in found(ranks)[name] for name in first["differences"]}
    assert len(names) == found(ranks)[name][0][0]["names"]
    popular, *_, unused = found(ranks)[name][0][0]["load"][:8]
    assert unused == 0
    length = CASES[ranks][name].get("train", {}).get("seq_len", 13)
    assert popular == 8 * length  # every token of the batch


def test_what_is_gathered_together_changes_no_bit(found: Callable[[str], dict[str, Any]]) -> None:
    cases = found("2")
    for name in ("ep 1, by class", "ep 1, by size"):
        assert [one["bits"] for (one,) in cases[name]] == [one["bits"] for (one,) in cases["ep 1"]]
