"""Sizes that do not multiply to the ranks: what is offered fits when it is typed."""

import math
import re
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError

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
)  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_the_offered_layout_fits(words: str, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""}
    with pytest.raises(ConfigError, match="but cluster.nodes x cluster.ranks_per_node = ") as refused:
        compose("tiny-gpt", words.split(), environ=environ)
    offered = re.findall(r"parallel\.\w+=\w+", refused.value.hint)
    config = compose("tiny-gpt", [*words.split(), *offered], environ=environ).config
    layout = config.parallel
    assert offered
    assert math.prod(layout.mesh_sizes(config.cluster.world_size)) == config.cluster.world_size


@pytest.mark.parametrize(
    "words",
    [
        "parallel.strategy=ddp",
        "parallel.strategy=hsdp",
        "parallel.strategy=zero3 parallel.dp_replicate=2",
        "parallel.strategy=fsdp parallel.dp_replicate=4",
        "model.heads=5",
        "model.heads=3 model.dim=48",
    ],
)
def test_what_a_strategy_needs_is_typed_with_it(words: str, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""}
    with pytest.raises(ConfigError) as refused:
        compose("tiny-gpt", words.split(), environ=environ)
    offered = refused.value.hint.removeprefix("type ").split()
    assert compose("tiny-gpt", [*words.split(), *offered], environ=environ)
