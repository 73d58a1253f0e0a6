"""Whether the nodes that Slurm reports can ever run a job, and what to ask for instead."""

from typing import Any

import pytest

from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.node_capacity import megabytes, partitions_here, read_nodes, shortfall

SINFO = """\
n1|low*|8|4000|(null)
n1|high|8|4000|(null)
n2|low*|8|3900|(null)
n3|low*|4|8000|(null)
g1|gpu|64|512000|gpu:a100:4(S:0-1),nvme:1
g2|gpu|64|512000|gpu:a100:2,gpu:v100:2
g3|gpu|64|257000|gres/gpu:8
CLUSTER: lab
"""
NODES = read_nodes(SINFO)


def test_rows_are_read_and_others_left_out() -> None:
    assert [(node.name, node.partition, node.gpus) for node in NODES if node.partition in ("gpu", "high")] == [
        ("n1", "high", 0), ("g1", "gpu", 4), ("g2", "gpu", 4), ("g3", "gpu", 8)
    ]  # fmt: skip
    assert len(NODES) == 7
    assert partitions_here("low*\nhigh\n\n") == {"low": True, "high": False}


SHORT: list[tuple[dict[str, Any], str, str]] = [
    ({"nodes": 2, "mem": "8G"}, "cluster.mem=8G on 2 nodes: partition low has no node with that much",
     "cluster.mem=4000M"),
    ({"nodes": 3, "mem": "4000M"}, "cluster.mem=4000M on 3 nodes: partition low has 2 nodes with that much",
     "cluster.mem=3900M"),
    ({"nodes": 3, "cpus_per_task": 8}, "cluster.cpus_per_task=8 on 3 nodes: partition low has 2 nodes with that much",
     "cluster.cpus_per_task=4"),
    ({"nodes": 2, "exclude": ("n[1-2]",)}, "cluster.exclude leaves 1 node of 3 of partition low", "~cluster.exclude"),
    ({"nodes": 1, "exclude": ("n1", "n[2-3]")}, "cluster.exclude leaves no node of 3 of partition low",
     "~cluster.exclude"),
    ({"nodes": 9}, "cluster.nodes=9: partition low has 3 nodes", "cluster.nodes=3"),
    ({"nodes": 4, "spares": 1}, "cluster.nodes=3 and cluster.spare_nodes=1: partition low has 3 nodes",
     "cluster.spare_nodes=0"),
    ({"nodes": 6, "spares": 2}, "cluster.nodes=4 and cluster.spare_nodes=2: partition low has 3 nodes",
     "cluster.nodes=3 cluster.spare_nodes=0"),
    ({"nodes": 2, "partition": "high"}, "cluster.nodes=2: partition high has 1 node", "cluster.nodes=1"),
    ({"nodes": 2, "partition": "gpu", "gpus_per_node": 8},
     "cluster.gpus_per_node=8 on 2 nodes: partition gpu has 1 node with that much",
     "cluster.gpus_per_node=4 cluster.ranks_per_node=4"),
    ({"nodes": 2, "gpus_per_node": 1}, "cluster.gpus_per_node=1 on 2 nodes: partition low has no node with that much",
     "cluster.gpus_per_node=0"),
    # Each by itself is there, and no two nodes have both.
    ({"nodes": 1, "mem": "8000M", "cpus_per_task": 8},
     "cluster.mem=8000M, cluster.cpus_per_task=8: partition low has no node with all of that", ""),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "words", "change"), SHORT)
def test_what_no_node_has_is_told_with_what_to_type(asked: dict[str, Any], words: str, change: str) -> None:
    short = shortfall(Resources(**asked), NODES)
    assert short is not None
    assert (short.words, short.change) == (words, change)


@pytest.mark.parametrize(
    "asked",
    [
        {"nodes": 2, "mem": "3900M", "cpus_per_task": 8},
        {"nodes": 3, "mem": "0"},
        {"nodes": 3},
        {"nodes": 2, "partition": "high,gpu", "mem": "200G"},  # one of them is enough
        {"nodes": 2, "partition": "nope"},  # whether it exists is told by Slurm
    ],
)
def test_what_some_partition_has_is_no_shortfall(asked: dict[str, Any]) -> None:
    assert shortfall(Resources(**asked), NODES) is None


def test_what_orch_itself_avoids_comes_back() -> None:
    assert shortfall(Resources(nodes=3, exclude=("n1",), avoided=("n1",)), NODES) is None


def test_nothing_known_is_no_shortfall() -> None:
    assert shortfall(Resources(nodes=9, mem="900T"), []) is None


@pytest.mark.parametrize(("text", "mib"), [("2048K", 2.0), ("8", 8.0), ("8M", 8.0), ("2g", 2048.0), ("1TB", 1048576.0),
                                           ("", 0.0), ("lots", 0.0)])  # fmt: skip
def test_sizes(text: str, mib: float) -> None:
    assert megabytes(text) == mib
