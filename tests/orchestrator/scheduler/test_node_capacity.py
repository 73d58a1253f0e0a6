"""Capacity, states and number of nodes as Slurm reports them."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.controller.submission_limits import PartitionSizes
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.scheduler.interface import UNREADABLE, Resources
from orchestrator.scheduler.slurm import node_capacity
from orchestrator.scheduler.slurm.node_capacity import (
    count_usable,
    megabytes,
    partitions_here,
    read_nodes,
    shortfall,
    usable_nodes,
)
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.orchestrator.scheduler.conftest import Program, printing
from tests.orchestrator.scheduler.test_slurm_text import queue

SINFO = """\
n1|low*|8|4000|(null)|idle
n1|high|8|4000|(null)|idle
n2|low*|8|3900|(null)|idle
n3|low*|4|8000|(null)|idle
g1|gpu|64|512000|gpu:a100:4(S:0-1),nvme:1|idle
g2|gpu|64|512000|gpu:a100:2,gpu:v100:2|idle
g3|gpu|64|257000|gres/gpu:8|idle
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
    ({"nodes": 2, "exclude": ("n[1-2]",)}, "cluster.exclude leaves 1 node of 3 in partition low", "~cluster.exclude"),
    ({"nodes": 1, "exclude": ("n1", "n[2-3]")}, "cluster.exclude leaves no node of 3 in partition low",
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
def test_unavailable_resources_are_refused_with_a_hint(asked: dict[str, Any], words: str, change: str) -> None:
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
def test_resources_of_any_partition_are_no_shortfall(asked: dict[str, Any]) -> None:
    assert shortfall(Resources(**asked), NODES) is None


def test_nodes_that_orch_avoids_are_no_shortfall() -> None:
    assert shortfall(Resources(nodes=3, exclude=("n1",), avoided=("n1",)), NODES) is None


def test_unknown_capacity_is_no_shortfall() -> None:
    assert shortfall(Resources(nodes=9, mem="900T"), []) is None


@pytest.mark.parametrize(("text", "mib"), [("2048K", 2.0), ("8", 8.0), ("8M", 8.0), ("2g", 2048.0), ("1TB", 1048576.0),
                                           ("", 0.0), ("lots", 0.0)])  # fmt: skip
def test_sizes(text: str, mib: float) -> None:
    assert megabytes(text) == mib


def test_down_nodes_of_an_ended_job(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n[1-3]")))
    program("sacct", "true")
    program("sinfo", r"printf 'n1 idle\nn2 down*\nn3 idle*\n'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n2",)


def test_nodes_that_get_no_jobs_for_now(program: Program) -> None:
    states = ["idle", "down*", "drained", "draining*", "maint", "mixed", "idle*", "reboot", "fail"]
    names = [f"n{number}" for number in range(len(states))]
    program("sinfo", "; ".join(f"echo {one} {state!r}" for one, state in zip(names, states, strict=True)))
    assert SlurmScheduler().out_of_service(frozenset(names)) == {"n1", "n2", "n3", "n4", "n7", "n8"}
    program("sinfo", "exit 1")
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().out_of_service(frozenset(names))


@pytest.mark.parametrize(
    ("states", "out"),
    [
        (["drained$", "down$", "down@", "draining^", "drained~", "inval", "inval*", "maint*"], True),
        (["idle~", "idle#", "allocated+", "mixed-", "allocated$", "allocated@"], False),
    ],
)
def test_flags_of_a_state_do_not_change_service(program: Program, states: list[str], out: bool) -> None:
    names = [f"n{number}" for number in range(len(states))]
    program("sinfo", "; ".join(f"echo {one} {state!r}" for one, state in zip(names, states, strict=True)))
    assert SlurmScheduler().out_of_service(frozenset(names)) == (set(names) if out else set())


def test_a_node_that_is_down_in_a_maintenance_reservation_is_down(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n1")))
    program("sacct", "true")
    program("sinfo", "echo 'n1 down$'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n1",)


def test_silence_about_one_job_s_nodes_hides_no_other_job(program: Program, tmp_path: Path) -> None:
    rows = queue(JobID="7", State="FAILED", NodeList="n1") + queue(JobID="8")
    program("squeue", printing(tmp_path, "queue", rows))
    program("sinfo", "exit 1")
    assert {key: job.state for key, job in SlurmScheduler().poll(["7", "8"]).items()} == {
        "7": UNREADABLE,
        "8": "RUNNING",
    }


def test_a_warning_among_the_nodes_hides_none(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n[1-2]")))
    program("sinfo", r"printf 'sinfo: warning: slow today\nn1 idle\nn2 down*\n'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n2",)


def test_nodes_of_hidden_partitions_are_seen_whatever_the_shell_asks_of_sinfo(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "debug")
    hidden = 'test -z "$SINFO_PARTITION" || exit 0; case " $* " in *" -p "*) exit 1 ;; *" -a "*) {} ;; esac'
    program("sinfo", hidden.format("echo n1 drained"))
    assert SlurmScheduler().out_of_service(frozenset({"n1"})) == {"n1"}
    program("sinfo", hidden.format("echo 4 secret"))
    assert PartitionSizes()(RunConfig(cluster=ClusterConfig(partition="secret"))) == 4
    program("sinfo", hidden.format("echo n1"))
    factory = FACTORIES["slurm"]
    assert factory.has_node is not None
    assert factory.has_node("n1")
    program("sinfo", hidden.format("echo 'n1|secret|8|4000|(null)|idle'"))
    assert usable_nodes(Resources(nodes=1, partition="secret"), frozenset()) == 1


@pytest.mark.parametrize("sinfo", ["exit 1", "echo nonsense of three words"])
def test_silence_about_nodes_is_no_answer(program: Program, tmp_path: Path, sinfo: str) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n1")))
    program("sacct", "true")
    program("sinfo", sinfo)
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().poll(["7"])


SINFO_STATES = """\
n1|low*|8|4000|(null)|idle
n1|high|8|4000|(null)|idle
n2|low*|8|4000|(null)|allocated
n3|low*|8|4000|(null)|mixed
n4|low*|4|4000|(null)|idle
n5|low*|8|4000|(null)|down*
n6|low*|8|4000|(null)|drained
n7|low*|8|4000|(null)|idle*
n8|low*|8|4000|(null)|idle~
n9|low*|8|4000|(null)|maint
n10|low*|8|4000|(null)|idle$
n11|low*|8|4000|(null)|unheard-of
"""


@pytest.mark.parametrize(
    ("asked", "without", "count"),
    [
        ({}, (), 5),  # n1 to n4, and n8, which is only asleep
        ({"cpus_per_task": 8}, (), 4),
        ({"cpus_per_task": 8}, ("n2", "n5"), 3),
        ({"exclude": ("n[1-2]",)}, (), 3),
        ({"exclude": ("n[1-2]",), "avoided": ("n1", "n2")}, ("n1",), 4),  # what orch avoids it may take again
        ({"partition": "high"}, (), 1),
        ({"partition": "low,high"}, (), 5),
        ({"partition": "nowhere"}, (), None),
        ({"cpus_per_task": 99}, (), 0),
    ],
)
def test_nodes_in_service_that_have_what_is_asked(
    asked: dict[str, Any], without: tuple[str, ...], count: int | None
) -> None:  # fmt: skip
    assert count_usable(Resources(nodes=4, **asked), without, read_nodes(SINFO_STATES)) == count


def test_a_slurm_that_does_not_answer_is_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_capacity, "run_command", lambda command, timeout: Failed())
    with pytest.raises(SlurmUnreachable, match="sinfo got no usable answer from Slurm: slurmctld does not answer"):
        node_capacity.usable_nodes(Resources(nodes=1), frozenset())


class Failed:
    returncode, stdout, stderr = 1, "", "slurm_load_partitions: Unable to contact slurm controller"
