"""Sizes that do not multiply to the ranks: what is offered fits when it is typed."""

import re
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError

WRONG = (
    "parallel.tp=3", "parallel.tp=8", "parallel.dp_shard=3", "parallel.dp_shard=0 parallel.tp=3",
    "parallel.dp_replicate=3 parallel.tp=1", "parallel.tp=3 parallel.dp_replicate=2 parallel.dp_shard=0",
    "parallel.tp=6 cluster.nodes=3 train.batch_size=36", "cluster.nodes=3 train.batch_size=36",
)  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_the_offered_layout_fits(words: str, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""}
    with pytest.raises(ConfigError, match="but cluster.nodes x cluster.ranks_per_node = ") as refused:
        compose("tiny-gpt", words.split(), environ=environ)
    offered = re.findall(r"parallel\.\w+=\d+", refused.value.hint)
    config = compose("tiny-gpt", [*words.split(), *offered], environ=environ).config
    layout = config.parallel
    shards = layout.shard_size(config.cluster.world_size)
    assert offered
    assert layout.dp_replicate * shards * layout.tp == config.cluster.world_size
