"""What becomes of the ranks' first measurements."""

from pathlib import Path
from typing import Any

import pytest

from trainer.agent.nodes.node_benchmark import NodeBenchmark, usual_speeds
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.messages.agents import RankSpeeds
from trainer.protocol.messages.ranks import Speeds
from trainer.protocol.run_dir import RunDir
from trainer.worker.startup.node_benchmark import partners

NODES = ["n0", "n1", "n2", "n3"]
MACHINES = {node: f"boot-{node}" for node in NODES}


def told(rank: int, matmul: float = 1e9) -> RankSpeeds:
    return RankSpeeds(generation=1, rank=rank, speeds=Speeds(matmul=matmul, memory=1e10, pairs=()))


def measured(machines: dict[str, str], slow: int | None = None) -> NodeBenchmark:
    benchmark = NodeBenchmark(NODES, machines, PreflightConfig())
    for rank in range(4):
        assert not benchmark.end_trial(0.0)
        benchmark.add(told(rank, 2e8 if rank == slow else 1e9), 0.0)
    assert [benchmark.end_trial(0.0) for _ in range(2)] == [True, False]
    return benchmark


def test_nodes_that_are_fit_pass_and_their_median_is_told() -> None:
    benchmark = measured(MACHINES)
    assert benchmark.failure() is None
    assert benchmark.median_speeds() == {"matmul": 1e9, "memory": 1e10}


@pytest.mark.parametrize("machines", [{}, {node: "one" for node in NODES}, {**MACHINES, "n3": "boot-n0"}])
def test_nodes_that_may_share_a_machine_are_not_held_against_each_other(machines) -> None:
    assert measured(machines, slow=2).failure() is None


def test_a_rank_counts_once_and_only_if_there_is_one() -> None:
    benchmark = NodeBenchmark(NODES[:2], MACHINES, PreflightConfig())
    benchmark.add(told(0), 0.0)
    benchmark.add(told(0), 0.0)
    assert not benchmark.end_trial(0.0)
    with pytest.raises(ValueError, match="no such rank: 2"):
        benchmark.add(told(2), 0.0)


def test_missing_figures_are_given_up_once_and_the_others_still_count() -> None:
    benchmark = NodeBenchmark(NODES, MACHINES, PreflightConfig(seconds=60.0))
    assert not benchmark.end_trial(1000.0), "nobody has begun"
    for rank, at in ((0, 100.0), (1, 110.0), (2, 120.0)):
        benchmark.add(told(rank, 2e8 if rank == 2 else 1e9), at)
    assert [benchmark.end_trial(at) for at in (160.0, 160.1, 170.0)] == [False, True, False]
    assert benchmark.missing() == [3]
    failure = benchmark.failure()
    assert failure.node == "n2"
    benchmark.add(told(3), 171.0)
    assert not benchmark.end_trial(171.0), "too late to be judged again"


def earlier(folder: Path, *attempts: list[dict[str, Any]]) -> RunDir:
    """A run whose attempts, from 1 on, have measured these."""
    run = RunDir(folder)
    for number, told_by_all in enumerate(attempts, 1):
        run.attempt(number).events.mkdir(parents=True)
        log = EventLog(run.attempt(number).event_file("coordinator"), "coordinator", number)
        log.write(EventKind.PREFLIGHT, node=0, name="n0", ok=True, reason="")
        for speeds in told_by_all:
            log.write(EventKind.PREFLIGHT, ok=True, reason="", speeds=speeds)
        log.close()
    return run


def speeds(matmul: Any, memory: Any = 1e10) -> list[dict[str, Any]]:
    return [{"matmul": matmul, "memory": memory}]


@pytest.mark.parametrize(
    ("attempts", "found"),
    [
        ([], {}),
        ([speeds(1e9)], {}),  # one figure is no history
        ([speeds(1e9), speeds(1.2e9), speeds(0.9e9)], {"matmul": 1e9, "memory": 1e10}),
        ([speeds(1e9), speeds(3e9)], {"memory": 1e10}),  # other machines, or others ran on them
        ([speeds(1e9), [], speeds(1e9, 9e9)], {"matmul": 1e9, "memory": 9.5e9}),
        ([speeds(1e9), speeds("odd"), speeds(0.0), speeds(1e9)], {"matmul": 1e9, "memory": 1e10}),
        ([speeds(1e9), [{"matmul": 1e9}, {"matmul": 9e9}]], {"matmul": 1e9}),  # the first of each: all nodes were new
    ],
)
def test_what_is_usual_in_this_run(tmp_path, attempts, found) -> None:
    run = earlier(tmp_path, *attempts)
    assert usual_speeds(run, len(attempts) + 1, PreflightConfig()) == found


def test_events_that_are_none_and_later_attempts_are_left_out(tmp_path) -> None:
    run = earlier(tmp_path, speeds(1e9), speeds(1e9), speeds(9e9))
    with run.attempt(2).event_file("coordinator").open("ab") as stream:
        stream.write(b'{"kind": 3}\n[]\n{"torn')
    run.attempt(1).event_file("coordinator").write_bytes(b"[1]\n7\nnull\n" + b"x" * 50)
    assert usual_speeds(run, 3, PreflightConfig()) == {}


def test_of_a_single_node_its_runs_history_speaks() -> None:
    benchmark = NodeBenchmark(["n0"], MACHINES, PreflightConfig())
    benchmark.add(told(0, 5e8), 0.0)
    assert benchmark.failure() is None
    failure = benchmark.failure({"matmul": 1e9})
    assert failure.reason.startswith("n0: matrix multiplication at 0.50 x the median of earlier attempts")


RANKS = 2
"""On every node."""


def benchmark(nodes: int, *, slow: dict[int, float] | None = None, **pairs: float) -> NodeBenchmark:
    """Ranks with equal speeds except those in `slow`; `pairs`: seconds of some pairs, as `n0_n1`."""
    names = [f"n{rank // RANKS}" for rank in range(nodes * RANKS)]
    made = NodeBenchmark(names, {name: f"boot-{name}" for name in names}, PreflightConfig())
    for rank in range(nodes * RANKS):
        peers = [peer for peer in partners(rank, nodes * RANKS, RANKS) if peer >= 0]
        times = tuple((peer, seconds(rank, peer, pairs)) for peer in peers)
        speeds = Speeds(matmul=1e9 * (slow or {}).get(rank, 1.0), memory=1e10, pairs=times)
        made.add(RankSpeeds(generation=1, rank=rank, speeds=speeds), 0.0)
    return made


def seconds(rank: int, peer: int, pairs: dict[str, float]) -> float:
    first, second = sorted((rank // RANKS, peer // RANKS))
    return pairs.get(f"n{first}_n{second}", 0.1)


def test_fit_nodes_pass():
    for nodes in (1, 2, 3, 4, 5, 9):
        assert benchmark(nodes).failure() is None


def test_a_slow_rank_makes_its_node_suspect_with_figures():
    failure = benchmark(3, slow={4: 0.5}).failure()
    assert (failure.kind, failure.node) == (FailureKind.NODE_SUSPECT, "n2")
    assert failure.reason == (
        "n2: matrix multiplication at 0.50 x the median of the 2 others, below detection.preflight.slowest=0.6"
    )


def test_the_slowest_of_several_is_blamed():
    failure = benchmark(5, slow={0: 0.5, 8: 0.3}).failure()
    assert failure.node == "n4"


def test_two_nodes_are_compared_with_earlier_attempts_only():
    slow = benchmark(2, slow={0: 0.3})
    assert slow.failure() is None
    assert slow.failure({}) is None
    failure = slow.failure(benchmark(4).median_speeds())
    assert failure.reason.startswith("n0: matrix multiplication at 0.30 x the median of earlier attempts")


def test_usual_speeds_are_the_median_of_the_nodes():
    assert benchmark(3, slow={0: 0.1}).median_speeds() == {"matmul": 1e9, "memory": 1e10}
    assert benchmark(0).median_speeds() == {}


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
    failure = benchmark(nodes, **pairs).failure()
    assert (failure and failure.node) == blamed
    if failure is not None:
        assert failure.kind is FailureKind.NODE_SUSPECT
        assert "exchanges data slowly with every partner: " in failure.reason


def test_slow_pairs_within_a_node_are_ignored():
    assert benchmark(4, n0_n0=9.0, n1_n1=9.0, n2_n2=9.0, n3_n3=9.0).failure() is None


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
def test_invalid_speeds_are_refused(speeds):
    with pytest.raises(ValueError, match="measurements must be positive"):
        benchmark(1).add(RankSpeeds(generation=1, rank=0, speeds=speeds), 0.0)
