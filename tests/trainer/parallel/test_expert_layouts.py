"""Layouts with shared experts: accepted sizes and refusals."""

from typing import Any

import pytest

from tests.trainer.parallel.grid import typed, words_of_hint
from trainer.parallel.layout import refusal
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build

EXPERTS = {"count": 8, "per_token": 2, "ffn_dim": 96}


def config(parallel: dict[str, Any], *, ranks: int = 8, experts: dict[str, Any] = EXPERTS, **train: Any) -> JobConfig:
    made = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": ranks},
            "parallel": parallel,
            "model": {"experts": experts, "heads": 8, "kv_heads": 8},
            "train": {"batch_size": 48, **train},
        },
    )
    assert isinstance(made, JobConfig)
    return made


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 8), ({"strategy": "ddp"}, 8), ({"ep": 2}, 8), ({"ep": 8}, 8), ({"ep": 4, "cp": 2}, 8),
        ({"ep": 2, "cp": 2}, 2), ({"ep": 4, "strategy": "hsdp", "dp_replicate": 2}, 8),
        ({"ep": 4, "strategy": "zero1"}, 4), ({"ep": 2}, 6),
        ({"pipeline": {"stages": 2}}, 2), ({"pipeline": {"stages": 2}, "ep": 4}, 8),
        ({"pipeline": {"stages": 4, "schedule": "zbv"}, "ep": 2, "cp": 2}, 8),
        ({"pipeline": {"stages": 2, "schedule": "gpipe"}, "strategy": "ddp"}, 8),
        ({"tp": 2}, 8), ({"tp": 8, "ep": 8}, 8), ({"tp": 2, "ep": 4, "cp": 2}, 8), ({"tp": 2, "strategy": "ddp"}, 8),
    ],
)  # fmt: skip
def test_sizes_that_fit(parallel: dict[str, Any], ranks: int) -> None:
    assert refusal(config(parallel, ranks=ranks)) is None


RECOMPUTED = {"activation_checkpointing": True, "recompute": {"keep": "products"}}


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        (config({"ep": 2}, experts={}), "parallel.ep=2, but the model has no experts", "type parallel.ep=1"),
        (config({"ep": 4, "strategy": "ddp"}), "parallel.strategy=ddp, whose replicas", "type parallel.ep=1"),
        (config({"ep": 4}, ranks=6), "parallel.ep=4: must divide the 6 ranks", "type parallel.ep=2"),
        (
            config({"ep": 4, "strategy": "hsdp", "dp_replicate": 4}),
            "parallel.ep=4: must divide the 2 ranks that share layers (parallel.dp_shard x cp)",
            "type parallel.dp_replicate=2",
        ),
        (
            config({"ep": 3}, ranks=6),
            "model.experts.count=8: must be a multiple of parallel.ep=3",
            "type parallel.ep=2",
        ),
        (
            config({"ep": 2}, experts={**EXPERTS, "ffn_dim": 50}),
            "model.experts.ffn_dim=50: must be a multiple of the 4 ranks that have the same experts",
            "type parallel.ep=4",
        ),
        (
            config({"pipeline": {"stages": 2}, "ep": 8}),
            "parallel.ep=8: must divide the 4 ranks that share layers (parallel.dp_shard x cp)",
            "type parallel.ep=4",
        ),
        (
            config({"pipeline": {"stages": 2}, "ep": 2}, compile=True),
            "train.compile=true with model.experts.count=8",
            "type train.compile=false",
        ),
        (
            config({"tp": 2, "ep": 3}, ranks=6),
            "model.experts.count=8: must be a multiple of parallel.ep=3",
            "type parallel.ep=2",
        ),
        (
            config({"tp": 2, "ep": 8, "strategy": "hsdp", "dp_replicate": 2}),
            "parallel.ep=8: must divide the 4 ranks that share layers (parallel.dp_shard x cp x tp)",
            "type parallel.ep=4",
        ),
        (
            config({"tp": 2, "ep": 2, "strategy": "ddp"}),
            "parallel.ep=2 with parallel.strategy=ddp, whose replicas share no parameters",
            "type parallel.ep=1",
        ),
        (config({}, compile=True), "train.compile=true with model.experts.count=8", "type train.compile=false"),
        (config({"ep": 2}, **RECOMPUTED), "parallel.ep=2 with train.recompute.keep=products", "type parallel.ep=1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(given: JobConfig, what: str, hint: str) -> None:
    found = refusal(given)
    assert found is not None
    assert what in found.what
    assert found.hint == hint
    assert refusal(typed(given, words_of_hint(found.hint))) is None


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"count": 2, "per_token": 3}, "model.experts.per_token=3: must be at most model.experts.count=2"),
        ({"count": -1}, "model.experts.count=-1: must be at least 0"),
        ({"balance_rate": -0.1}, "model.experts.balance_rate=-0.1: must be at least 0"),
    ],
)
def test_sizes_that_no_ranks_could_have(experts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        config({}, experts=experts)
