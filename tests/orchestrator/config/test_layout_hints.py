"""Sizes that do not fit: the remedy in a refusal is accepted when typed."""

from pathlib import Path
from random import Random

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from tests.trainer.parallel.grid import drawn, words, words_of_hint
from trainer.parallel.layout import refusal

WRONG = (
    "parallel.tp=3", "parallel.tp=8", "parallel.dp_shard=3", "parallel.dp_shard=0 parallel.tp=3",
    "parallel.dp_replicate=3 parallel.tp=1", "parallel.tp=3 parallel.dp_replicate=2 parallel.dp_shard=0",
    "parallel.strategy=ddp parallel.dp_replicate=3 parallel.tp=1 parallel.dp_shard=0",
    "parallel.strategy=ddp parallel.dp_replicate=4 parallel.dp_shard=0",
    "parallel.strategy=zero2 parallel.tp=3", "parallel.strategy=zero3 parallel.dp_shard=3",
    "parallel.strategy=hsdp parallel.dp_replicate=3 parallel.tp=1 parallel.dp_shard=0",
    "parallel.strategy=hsdp parallel.dp_replicate=4 parallel.tp=2 parallel.dp_shard=0",
    "parallel.strategy=hsdp parallel.dp_replicate=2 parallel.dp_shard=0 cluster.nodes=1 cluster.ranks_per_node=3 "
    "train.batch_size=36",
    "parallel.tp=6 cluster.nodes=3 train.batch_size=36", "cluster.nodes=3 train.batch_size=36",
    "parallel.strategy=ddp", "parallel.strategy=hsdp", "parallel.strategy=zero3 parallel.dp_replicate=2",
    "parallel.strategy=fsdp parallel.dp_replicate=4", "parallel.tp=4 parallel.dp_shard=1",
    "train.loss_chunks=7 train.batch_size=3",
)  # fmt: skip


def refused(typed: list[str], environ: dict[str, str]) -> ConfigError | None:
    try:
        config = compose("tiny-gpt", typed, environ=environ).config
    except ConfigError as error:
        return error
    assert refusal(config) is None
    return None


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""}


@pytest.mark.parametrize("typed", WRONG)
def test_offered_values_are_accepted(typed: str, environ: dict[str, str]) -> None:
    error = refused(typed.split(), environ)
    assert error is not None
    assert "override #" in error.where
    assert refused([*typed.split(), *words_of_hint(error.hint)], environ) is None


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.proof)])
def test_random_layouts_are_mended_by_what_is_offered(count: int, environ: dict[str, str]) -> None:
    rng = Random(18)
    accepted = mended = 0
    for _ in range(count):
        typed = words(drawn(rng, most_odd=4))
        error = refused(typed, environ)
        if error is None:
            accepted += 1
            continue
        assert "\n" not in error.what
        if error.hint.startswith("type "):  # no layout fits a model whose own sizes conflict
            assert refused([*typed, *words_of_hint(error.hint)], environ) is None, (typed, error.hint)
            mended += 1
    assert accepted
    assert mended
