"""Layouts of restore tests as configurations."""

from typing import Any

import pytest

from orchestrator.config.restore_tests_config import rank_count, with_layout
from orchestrator.config.run_config import ClusterConfig, RunConfig
from trainer.parallel.layout import refusal
from trainer.parallel.parallel_config import ParallelConfig

DATA: dict[str, Any] = {
    "cluster": {"nodes": 8, "ranks_per_node": 8, "gpus_per_node": 8, "spare_nodes": 1, "partition": "gpu"},
    "parallel": {"dp_replicate": 4, "dp_shard": 4, "tp": 4},
}


@pytest.mark.parametrize(
    ("layout", "nodes", "ranks", "parallel"),
    [
        ("same", 8, 8, (4, 4, 4)),
        ("1", 1, 1, (1, 0, 1)),
        ("8", 1, 8, (1, 0, 4)),
        ("2x6", 2, 6, (1, 0, 2)),
        ("4x8", 4, 8, (4, 0, 4)),
    ],
)
def test_tensor_parallelism_and_replicas_stay_as_far_as_they_fit(
    layout: str, nodes: int, ranks: int, parallel: tuple[int, int, int]
) -> None:
    made = with_layout(DATA, layout)
    assert made["cluster"] == {
        "nodes": nodes, "ranks_per_node": ranks, "gpus_per_node": ranks, "spare_nodes": 0, "min_nodes": 0,
        "partition": "gpu"
    }  # fmt: skip
    assert tuple(made["parallel"][name] for name in ("dp_replicate", "dp_shard", "tp")) == parallel
    config = RunConfig(cluster=ClusterConfig(nodes=8, ranks_per_node=8))
    assert rank_count(layout, config) == nodes * ranks


@pytest.mark.parametrize(
    ("layout", "cp", "tp"),
    [("same", 4, 2), ("8", 4, 2), ("4", 2, 2), ("2", 1, 2), ("1", 1, 1), ("2x3", 2, 1), ("6", 1, 2)],
)
def test_context_parallelism_stays_as_far_as_it_fits_behind_tensor_parallelism(layout: str, cp: int, tp: int) -> None:
    data = {**DATA, "parallel": {"dp_replicate": 1, "dp_shard": 8, "cp": 4, "tp": 2}}
    made = with_layout(data, layout)["parallel"]
    assert (made["cp"], made["tp"]) == (cp, tp)


@pytest.mark.parametrize(
    ("layout", "width", "ep"), [("same", 96, 4), ("8", 96, 4), ("6", 96, 2), ("1", 96, 1), ("8", 97, 1), ("4", 97, 4)]
)
def test_experts_are_shared_by_as_many_ranks_as_can(layout: str, width: int, ep: int) -> None:
    experts = {"count": 8, "ffn_dim": width}
    data = {**DATA, "parallel": {"dp_replicate": 1, "dp_shard": 64, "tp": 1, "ep": 4}, "model": {"experts": experts}}
    assert with_layout(data, layout)["parallel"]["ep"] == ep


def test_cpus_stay_cpus() -> None:
    data = {**DATA, "cluster": {**DATA["cluster"], "gpus_per_node": 0}}
    assert with_layout(data, "2")["cluster"]["gpus_per_node"] == 0


def test_replicas_of_ddp_are_all_ranks_of_the_test() -> None:
    parallel = {"strategy": "ddp", "dp_replicate": 2, "dp_shard": 0, "tp": 1}
    made = with_layout({"cluster": {**DATA["cluster"], "gpus_per_node": 0}, "parallel": parallel}, "4")
    config = RunConfig(cluster=ClusterConfig(nodes=1, ranks_per_node=4), parallel=ParallelConfig(**made["parallel"]))
    assert refusal(config) is None


@pytest.mark.parametrize(
    ("micro", "layout", "size"), [(8, "4", 4), (8, "1", 8), (8, "same", 8), (0, "4", 0), (8, "3", 8)]
)
def test_a_forward_pass_takes_what_divides_the_share_of_a_rank(micro: int, layout: str, size: int) -> None:
    parallel = {"dp_replicate": 1, "dp_shard": 0, "tp": 1}
    data = {**DATA, "parallel": parallel, "train": {"batch_size": 16, "micro_batch_size": micro}}
    assert with_layout(data, layout).get("train", data["train"])["micro_batch_size"] == size
