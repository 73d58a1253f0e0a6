"""Which node is blamed for what ranks have measured before the first step, on tables."""

import pytest

from trainer.agent.nodes.node_benchmark import RankMeasurement, find_slow_node, median_speeds_of_nodes
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.messages.agents import RankSpeeds
from trainer.protocol.messages.ranks import Speeds
from trainer.worker.startup.node_benchmark import partners

CONFIG = PreflightConfig()
RANKS = 2
"""On every node."""


def names(nodes: int) -> list[str]:
    return [f"n{rank // RANKS}" for rank in range(nodes * RANKS)]


def measured(nodes: int, *, slow: dict[int, float] | None = None, **pairs: float) -> list[RankMeasurement]:
    """Ranks that are alike but for the speed of those in `slow`; `pairs`: seconds of some pairs, as `n0_n1`."""
    found = []
    for rank in range(nodes * RANKS):
        peers = [peer for peer in partners(rank, nodes * RANKS, RANKS) if peer >= 0]
        times = tuple((peer, seconds(rank, peer, pairs)) for peer in peers)
        speed = (slow or {}).get(rank, 1.0)
        found.append(RankMeasurement(rank=rank, matmul=1e9 * speed, memory=1e10, pairs=times))
    return found


def seconds(rank: int, peer: int, pairs: dict[str, float]) -> float:
    first, second = sorted((rank // RANKS, peer // RANKS))
    return pairs.get(f"n{first}_n{second}", 0.1)


def test_fit_nodes_pass():
    for nodes in (1, 2, 3, 4, 5, 9):
        assert find_slow_node(measured(nodes), names(nodes), CONFIG) is None


def test_a_slow_rank_makes_its_node_suspect_with_figures():
    failure = find_slow_node(measured(3, slow={4: 0.5}), names(3), CONFIG)
    assert failure is not None
    assert (failure.kind, failure.node) == (FailureKind.NODE_SUSPECT, "n2")
    assert failure.reason == (
        "n2: matrix multiplication at 0.50 x the median of the 2 others, below detection.preflight.slowest=0.6"
    )


def test_the_slowest_of_several_is_blamed():
    failure = find_slow_node(measured(5, slow={0: 0.5, 8: 0.3}), names(5), CONFIG)
    assert failure is not None
    assert failure.node == "n4"


def test_two_nodes_are_held_against_the_fleet_only():
    slow = measured(2, slow={0: 0.3})
    assert find_slow_node(slow, names(2), CONFIG) is None
    failure = find_slow_node(slow, names(2), CONFIG, median_speeds_of_nodes(measured(4), names(4)))
    assert failure is not None
    assert failure.reason.startswith("n0: matrix multiplication at 0.30 x the median of earlier attempts")
    assert find_slow_node(slow, names(2), CONFIG, {}) is None


def test_what_the_fleet_can_do_is_the_median_of_its_nodes():
    assert median_speeds_of_nodes(measured(3, slow={0: 0.1}), names(3)) == {"matmul": 1e9, "memory": 1e10}
    assert median_speeds_of_nodes([], []) == {}


@pytest.mark.parametrize(
    ("nodes", "pairs", "blamed"),
    [
        (4, {"n0_n1": 1.0, "n1_n2": 1.0}, "n1"),  # both its partners are fast with others
        (4, {"n0_n1": 1.0}, None),  # one pair: nobody knows which of them
        (6, {"n0_n5": 0.3, "n0_n1": 0.3}, "n0"),
        (3, {"n0_n1": 1.0, "n1_n2": 1.0}, "n1"),
        (5, {"n2_n3": 1.0, "n3_n4": 1.0}, "n3"),
        (2, {"n0_n1": 9.0}, None),
        (4, {"n0_n1": 0.15, "n1_n2": 0.15}, None),  # within what is usual
        (4, {"n0_n1": 1.0, "n1_n2": 1.0, "n2_n3": 1.0, "n0_n3": 1.0}, None),  # a slow network is nobody's fault
    ],
)
def test_two_rounds_isolate_the_node_that_exchanges_slowly(nodes, pairs, blamed):
    failure = find_slow_node(measured(nodes, **pairs), names(nodes), CONFIG)
    assert (failure and failure.node) == blamed
    if failure is not None:
        assert failure.kind is FailureKind.NODE_SUSPECT
        assert "exchanges data slowly with every partner: " in failure.reason


def test_slow_pairs_within_a_node_are_not_the_networks():
    found = measured(4)
    within = [RankMeasurement(rank=one.rank, matmul=1e9, memory=1e10, pairs=((one.rank ^ 1, 9.0),)) for one in found]
    assert find_slow_node(within, names(4), CONFIG) is None


@pytest.mark.parametrize("nodes", range(1, 10))
@pytest.mark.parametrize("local", [1, 2, 3])
def test_both_of_a_pair_meet_in_the_same_round(nodes, local):
    world = nodes * local
    plans = [partners(rank, world, local) for rank in range(world)]
    for rank, plan in enumerate(plans):
        assert len(plan) == len(plans[0]), "a round is a round for all"
        for turn, peer in enumerate(plan):
            assert peer == -1 or (peer != rank and plans[peer][turn] == rank)
    met = [{peer // local for peer in plans[node * local][:-1] if peer >= 0} for node in range(nodes)]
    assert all(len(others) >= min(2, nodes - 1) for others in met)


@pytest.mark.parametrize(
    "speeds",
    [
        Speeds(matmul=0.0, memory=1.0, pairs=()),
        Speeds(matmul=1.0, memory=-1.0, pairs=()),
        Speeds(matmul=1.0, memory=1.0, pairs=((1, float("nan")),)),
    ],
)
def test_speeds_that_are_none_are_refused(speeds):
    with pytest.raises(ValueError, match="measured nothing"):
        RankMeasurement.from_message(RankSpeeds(generation=1, rank=0, speeds=speeds))


def test_speeds_as_ranks_send_them():
    message = RankSpeeds(generation=1, rank=3, speeds=Speeds(matmul=2.0, memory=3.0, pairs=((1, 0.5),)))
    assert RankMeasurement.from_message(message) == RankMeasurement(rank=3, matmul=2.0, memory=3.0, pairs=((1, 0.5),))
