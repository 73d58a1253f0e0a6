"""Impossible values of `cluster.min_nodes` are refused at submission, with possible ones."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError


def composed(tmp_path: Path, *words: str) -> Any:
    four = ("cluster.nodes=4", "cluster.ranks_per_node=2", "parallel.dp_shard=0", *words)
    return compose("tiny-gpt", four, environ={"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""})


REFUSED = [
    ("cluster.min_nodes=-1", "cluster.min_nodes=-1: must be 0 (never fewer than cluster.nodes)", ""),
    ("cluster.min_nodes=5", "cluster.min_nodes=5: must be at most cluster.nodes=4", "cluster.min_nodes=3"),
    ("cluster.min_nodes=3", "do not fit train.batch_size=16 and `parallel`; these do: 2, 1", "cluster.min_nodes=2"),
    ("cluster.min_nodes=2 parallel.tp=8 parallel.tp_across_nodes=true model.heads=8 model.kv_heads=8",
     "no number of nodes does", "~cluster.min_nodes"),
    ("cluster.min_nodes=1 command=[python,train.py]", "your `command` sets its own batch size",
     "~cluster.min_nodes"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "what", "hint"), REFUSED)
def test_impossible_values_are_refused_with_a_hint(words: str, what: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(tmp_path, *words.split())
    assert what in refused.value.what
    assert "min_nodes" in refused.value.where
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "words", ["cluster.min_nodes=0", "cluster.min_nodes=2", "cluster.min_nodes=1", "cluster.min_nodes=4"]
)
def test_possible_values_are_accepted(words: str, tmp_path: Path) -> None:
    assert composed(tmp_path, words).config.cluster.min_nodes == int(words[-1])


def test_a_layout_that_does_not_fit_is_reported_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.dp_replicate=3"):
        composed(tmp_path, "cluster.min_nodes=2", "parallel.dp_replicate=3")
    with pytest.raises(ConfigError, match=r"train\.batch_size=18"):
        composed(tmp_path, "cluster.min_nodes=2", "train.batch_size=18")
