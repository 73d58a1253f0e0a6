"""Smaller worlds of a run: which there are, what changes in their configs, and what never does."""

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.config.run_config import RunConfig
from orchestrator.recovery.elastic_policy import WorldSize, fitting_nodes, resize_config, smaller_world, world_sizes
from trainer.protocol.config import build


def config(*, cluster: dict[str, Any], parallel: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    made = build(RunConfig, {"cluster": cluster, "parallel": parallel or {}, "train": train})
    assert isinstance(made, RunConfig)
    return made


def sizes(run: RunConfig) -> list[tuple[int, int]]:
    return [(size.nodes, size.spare_nodes) for size in world_sizes(run)]


def overrides(run: RunConfig, nodes: int) -> dict[str, Any]:
    size = smaller_world(run, nodes)
    assert size is not None
    return {key: value for key, value in size.overrides.items() if not key.startswith("cluster.")}


def test_without_min_nodes_there_is_the_full_size_alone() -> None:
    assert sizes(config(cluster={"nodes": 4, "spare_nodes": 2}, batch_size=16)) == [(4, 2)]


def test_spare_nodes_are_given_up_first_then_nodes_that_divide_the_batch() -> None:
    run = config(cluster={"nodes": 4, "spare_nodes": 2, "min_nodes": 1}, batch_size=16)
    assert sizes(run) == [(4, 2), (4, 1), (4, 0), (2, 0), (1, 0)]  # 3 nodes do not divide 16
    assert sizes(config(cluster={"nodes": 4, "min_nodes": 2}, batch_size=24)) == [(4, 0), (3, 0), (2, 0)]
    assert list(fitting_nodes(run)) == [2, 1]


@pytest.mark.parametrize(
    ("train", "nodes", "micro"),
    [
        ({"batch_size": 16}, 2, 4),  # 4 sequences at once before, 8 of each rank now: in two passes
        ({"batch_size": 16, "micro_batch_size": 2}, 2, 2),
        ({"batch_size": 24}, 3, 4),  # 6 at once before, 8 now: the largest divisor of 8 that is no more than 6
        ({"batch_size": 24}, 2, 6),
        ({"batch_size": 28}, 1, 7),
        ({"batch_size": 20}, 2, 5),
    ],
)
def test_no_forward_pass_has_more_sequences_than_before(train: dict[str, int], nodes: int, micro: int) -> None:
    run = config(cluster={"nodes": 4, "min_nodes": 1}, **train)
    assert overrides(run, nodes)["train.micro_batch_size"] == micro


@pytest.mark.parametrize(
    ("parallel", "nodes", "changed"),
    [
        ({}, 3, {}),  # dp_shard=0 takes the ranks that are left
        ({"strategy": "ddp"}, 3, {}),
        ({"strategy": "ddp", "dp_replicate": 8}, 3, {"dp_replicate": 6}),
        ({"dp_shard": 8}, 3, {"dp_shard": 6}),
        ({"tp": 2}, 3, {}),
        ({"tp": 2, "dp_shard": 4}, 2, {"dp_shard": 2}),
        ({"cp": 2}, 3, {}),
        ({"cp": 2, "tp": 2, "dp_shard": 2}, 2, {"dp_shard": 1}),
        ({"dp_replicate": 4}, 3, {"dp_replicate": 3}),  # groups of two stay groups of two
        ({"dp_replicate": 4, "dp_shard": 2}, 3, {"dp_replicate": 3}),
        ({"dp_replicate": 2, "dp_shard": 4}, 3, {"dp_shard": 3}),  # one group of 4 would leave two ranks idle
        ({"dp_replicate": 2}, 2, {"dp_replicate": 1}),
        ({"strategy": "hsdp", "dp_replicate": 2}, 2, {"dp_replicate": 1, "strategy": "fsdp"}),
    ],
)
def test_replicas_are_given_up_before_shards(
    parallel: dict[str, Any], nodes: int, changed: dict[str, Any]
) -> None:  # fmt: skip
    run = config(cluster={"nodes": 4, "ranks_per_node": 2}, parallel=parallel, batch_size=48)
    found = {key.removeprefix("parallel."): value for key, value in overrides(run, nodes).items()}
    assert {key: value for key, value in found.items() if key != "train.micro_batch_size"} == changed


def test_a_world_that_would_split_a_group_that_shares_sequences_is_none() -> None:
    run = config(cluster={"nodes": 6}, parallel={"cp": 2}, batch_size=12)
    assert list(fitting_nodes(run)) == [4, 2]


def test_a_world_whose_groups_would_grow_is_none() -> None:
    run = config(cluster={"nodes": 8}, parallel={"dp_replicate": 4, "dp_shard": 2}, batch_size=840)
    assert [nodes for nodes in range(1, 8) if smaller_world(run, nodes) is None] == [5, 7]


def test_ranks_that_share_experts_stay_together() -> None:
    made = build(
        RunConfig,
        {
            "cluster": {"nodes": 6, "ranks_per_node": 2},
            "parallel": {"ep": 4},
            "model": {"experts": {"count": 8, "ffn_dim": 96}},
            "train": {"batch_size": 120},
        },
    )
    assert isinstance(made, RunConfig)
    assert list(fitting_nodes(made)) == [4, 2]  # of 10, 6 and 2 ranks no four share experts


def test_the_config_of_a_smaller_world_differs_in_its_keys_alone() -> None:
    data = {"name": "a", "cluster": {"nodes": 4}, "train": {"steps": 9}}
    size = WorldSize(nodes=2, overrides={"cluster.nodes": 2, "train.micro_batch_size": 4, "parallel.dp_shard": 2})
    assert resize_config(data, size) == {
        "name": "a", "cluster": {"nodes": 2}, "train": {"steps": 9, "micro_batch_size": 4}, "parallel": {"dp_shard": 2},
    }  # fmt: skip
    assert data == {"name": "a", "cluster": {"nodes": 4}, "train": {"steps": 9}}, "the run's own stays as it was"


@given(
    nodes=st.integers(1, 8), per_node=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 1, 2]), tp=st.sampled_from([1, 2, 4]),
    strategy=st.sampled_from(["auto", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]),
    replicas=st.integers(1, 8), fixed=st.booleans(), per_rank=st.integers(1, 12), micro=st.integers(0, 12),
)  # fmt: skip
def test_every_smaller_world_fits_and_none_asks_more_of_a_rank(
    *, nodes: int, per_node: int, cp: int, tp: int, strategy: str, replicas: int, fixed: bool, per_rank: int, micro: int
) -> None:
    world = nodes * per_node
    assume(world % (cp * tp) == 0)
    ranks = world // (cp * tp)
    assume(micro == 0 or per_rank % micro == 0)
    if strategy not in ("auto", "ddp", "hsdp"):
        replicas = 1
    assume(ranks % replicas == 0 and (strategy != "hsdp" or replicas > 1))
    if strategy == "ddp" and replicas > 1:
        replicas = ranks
    shards = ranks // replicas if fixed and strategy != "ddp" else 0
    run = config(
        cluster={"nodes": nodes, "ranks_per_node": per_node, "min_nodes": 1},
        parallel={"strategy": strategy, "cp": cp, "tp": tp, "dp_replicate": replicas, "dp_shard": shards},
        batch_size=per_rank * ranks, micro_batch_size=micro,
    )  # fmt: skip
    full = run.parallel.mesh_sizes(world)
    for size in world_sizes(run)[1:]:
        small = build(RunConfig, resize_config(asdict(run), size))
        mesh = small.parallel.mesh_sizes(small.cluster.world_size)
        assert math.prod(mesh) == size.nodes * per_node
        assert (mesh.cp, mesh.tp) == (cp, tp)
        assert mesh.dp_replicate <= full.dp_replicate
        assert mesh.dp_shard <= full.dp_shard
        assert small.train.batch_size == run.train.batch_size
        share, rest = divmod(small.train.batch_size, mesh.dp_replicate * mesh.dp_shard)
        assert (rest, share % small.train.micro_batch_size) == (0, 0)
        assert 1 <= small.train.micro_batch_size <= (micro or per_rank)
        assert {key for key, value in asdict(small).items() if value != asdict(run)[key]} <= {
            "cluster", "parallel", "train"
        }  # fmt: skip
