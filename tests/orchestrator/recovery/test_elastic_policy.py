"""Smaller worlds of a run: possible sizes, changes in their configs, and the choice of the next size."""

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.config.run_config import RunConfig
from orchestrator.recovery.elastic_policy import (
    LastAttempt,
    WorldSize,
    asked_nodes,
    choose_smaller_world,
    fitting_nodes,
    give_up_waiting,
    needs_choice,
    next_size,
    on_nodes,
    resize_config,
    size_words,
    smaller_world,
    world_sizes,
)
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.plain_data import build

SIZES = [WorldSize(nodes=4, spare_nodes=1), WorldSize(nodes=4), WorldSize(nodes=3), WorldSize(nodes=2)]
HOUR = 3600.0
GIVEN_UP = LastAttempt(asked=5, kind=FailureKind.NODES_MISSING, reason="2 nodes were missing for 1h01m")


@pytest.mark.parametrize(
    ("waited", "asked", "usable", "why"),
    [
        (HOUR - 1, 5, 3, ""),
        (HOUR + 60, 5, 3, "2 nodes were missing for 1h01m (recovery.patience=3600)"),
        (HOUR, 5, 4, "1 node was missing for 1h00m (recovery.patience=3600)"),
        (HOUR, 5, 9, "5 nodes were not free for 1h00m (recovery.patience=3600)"),  # other people's jobs
        (HOUR, 5, None, "5 nodes were not free for 1h00m (recovery.patience=3600)"),
        (HOUR, 3, 2, "1 node was missing for 1h00m (recovery.patience=3600)"),
        (99 * HOUR, 5, 1, ""),  # two nodes are the fewest: a smaller job would wait just as long
        (99 * HOUR, 2, 2, ""),  # there is nothing smaller
        (99 * HOUR, 2, None, ""),
    ],
)
def test_a_job_waits_for_its_nodes_until_patience_is_over(
    waited: float, asked: int, usable: int | None, why: str
) -> None:  # fmt: skip
    assert give_up_waiting(SIZES, asked, waited, HOUR, usable) == why


@pytest.mark.parametrize(
    ("usable", "nodes"),
    [(3, 3), (2, 2), (4, 4), (9, 4), (None, 4), (1, 2)],  # of 9 that are busy, one less than before is asked for
)
def test_after_a_wait_that_was_given_up_the_next_attempt_asks_for_less(usable: int | None, nodes: int) -> None:
    size, why = next_size(SIZES, GIVEN_UP, usable, HOUR)
    assert (size.nodes, size.spare_nodes) == (nodes, 0)
    assert why == "2 nodes were missing for 1h01m"


def test_a_full_attempt_that_ended_is_followed_by_a_full_one_whatever_is_in_service() -> None:
    lost = LastAttempt(asked=5, kind=FailureKind.NODE_LOST, reason="n2 is down")
    assert next_size(SIZES, lost, 3, HOUR)[0] is SIZES[0], "the node may be back before patience is over"
    assert next_size(SIZES, lost, 3, HOUR)[1] == ""


@pytest.mark.parametrize(
    ("usable", "all_nodes", "reason"),
    [
        (5, 5, "all 5 nodes again: Slurm has 5 nodes in service"),
        (8, 5, "all 5 nodes again: Slurm has 8 nodes in service"),
        (None, 5, "all 5 nodes again"),
        (4, 4, "1 node is still missing"),
        (3, 3, "2 nodes are still missing"),
        (2, 2, "3 nodes are still missing"),
        (0, 2, "5 nodes are still missing"),
    ],
)
def test_a_smaller_attempt_that_ended_is_followed_by_what_fits_now(
    usable: int | None, all_nodes: int, reason: str
) -> None:  # fmt: skip
    size, why = next_size(
        SIZES, LastAttempt(asked=3, kind=FailureKind.TIME_LIMIT, reason="its time was over"), usable, HOUR
    )
    assert (size.all_nodes, why) == (all_nodes, reason)


def test_a_run_that_is_never_smaller_asks_for_its_own_size() -> None:
    for kind in (FailureKind.NODE_LOST, FailureKind.NODES_MISSING, FailureKind.SUBMIT_DEFERRED):
        last = LastAttempt(asked=5, kind=kind, reason="lost", refused_for=2 * HOUR)
        assert not needs_choice(SIZES[:1], last)
        assert next_size(SIZES[:1], last, 1, HOUR)[0] is SIZES[0]


@pytest.mark.parametrize(
    ("usable", "refused_for", "all_nodes", "reason"),
    [
        (3, HOUR - 1, 5, ""),
        (3, HOUR + 60, 3,
         "2 nodes were missing for 1h01m, and a job of this size is refused (recovery.patience=3600)"),
        (5, 9 * HOUR, 5, ""),  # it is refused for another reason
        (1, 9 * HOUR, 5, ""),  # fewer than the fewest: no job could start
        (None, 9 * HOUR, 5, ""),
    ],
)  # fmt: skip
def test_a_size_that_slurm_refuses_for_longer_than_patience_is_given_up_too(
    usable: int | None, refused_for: float, all_nodes: int, reason: str
) -> None:
    last = LastAttempt(
        asked=5, kind=FailureKind.SUBMIT_DEFERRED, reason="Requested node configuration is not available",
        refused_for=refused_for,
    )  # fmt: skip
    size, why = next_size(SIZES, last, usable, HOUR)
    assert needs_choice(SIZES, last)
    assert (size.all_nodes, why) == (all_nodes, reason)


def test_cluster_sections_without_sizes_mean_one_node_and_no_spare() -> None:
    facts = choose_smaller_world({}, {}, "f00d", "a reason")
    assert list(facts.values()) == [1, 0, 1, 0, "a reason", "f00d"]


def test_a_smaller_world_in_words() -> None:
    full = {"nodes": 4, "spare_nodes": 2}
    world = choose_smaller_world({"nodes": 3, "spare_nodes": 0}, full, "f00d", "1 node was missing for 1h01m")
    assert size_words(3, world) == "attempt 3 runs on 3 of 4 nodes: 1 node was missing for 1h01m"
    assert size_words(3, None) == ""
    spares = choose_smaller_world({"nodes": 4, "spare_nodes": 1}, full, "f00d", "1 node was missing")
    assert on_nodes(spares) == "with 1 of 2 spare nodes: 1 node was missing"
    assert asked_nodes(spares) == 5


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
        assert math.prod(mesh.values()) == size.nodes * per_node
        assert (mesh["cp"], mesh["tp"]) == (cp, tp)
        assert mesh["dp_replicate"] <= full["dp_replicate"]
        assert mesh["dp_shard"] <= full["dp_shard"]
        assert small.train.batch_size == run.train.batch_size
        share, rest = divmod(small.train.batch_size, mesh["dp_replicate"] * mesh["dp_shard"])
        assert (rest, share % small.train.micro_batch_size) == (0, 0)
        assert 1 <= small.train.micro_batch_size <= (micro or per_rank)
        assert {key for key, value in asdict(small).items() if value != asdict(run)[key]} <= {
            "cluster", "parallel", "train"
        }  # fmt: skip
