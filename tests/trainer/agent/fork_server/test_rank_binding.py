"""Cores of ranks: near their GPU, or an equal share; never outside the job's mask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.agent.fork_server.rank_binding import (
    Place,
    Topology,
    bind_ranks,
    parse_cores,
    read_topology,
    shorten_cores,
    visible_gpus,
)

TWO_NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
LISTING = "0, GPU-aa, 00000000:17:00.0\n1, GPU-bb, 00000000:65:00.0\n2, GPU-cc, 00000001:CA:00.0\n"


def whole(ranks: int) -> Place:
    return Place(first=0, count=ranks, total=ranks)


def test_each_rank_gets_the_cores_of_its_gpus_numa_node_within_the_mask():
    topology = Topology(numa_cores=TWO_NODES, gpu_nodes=(1, 1, 0))
    cores, reason = bind_ranks(whole(3), {1, 2, 5, 6, 7}, topology)
    assert cores == [[5, 6, 7], [5, 6, 7], [1, 2]]
    assert reason == "the cores of its GPU's NUMA node"


@pytest.mark.parametrize(
    ("gpu_nodes", "allowed"),
    [((0, None), range(8)), ((0,), range(8)), ((0, 1), range(4)), ((), range(8))],
    ids=["an unknown place", "too few GPUs", "no core near a GPU", "no GPU"],
)
def test_ranks_share_equally_if_a_gpus_place_or_its_cores_are_unknown(gpu_nodes, allowed):
    cores, reason = bind_ranks(whole(2), allowed, Topology(numa_cores=TWO_NODES, gpu_nodes=gpu_nodes))
    half = len(allowed) // 2
    assert cores == [list(range(half)), list(range(half, 2 * half))]
    assert reason == "an equal share of the job's cores"


def test_both_threads_of_a_core_go_to_one_rank():
    threads = {cpu: cpu % 4 for cpu in range(8)}  # 4 is the second thread of core 0
    cores, _ = bind_ranks(whole(2), range(8), Topology(first_threads=threads))
    assert cores == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_simulated_nodes_divide_one_machine():
    shares = [bind_ranks(Place(first=2 * node, count=2, total=4), range(4), Topology())[0] for node in (0, 1)]
    assert shares == [[[0], [1]], [[2], [3]]]


def test_fewer_cores_than_ranks_are_not_divided():
    cores, reason = bind_ranks(Place(first=2, count=2, total=4), {0, 1}, Topology())
    assert (cores, reason) == ([[], []], "not bound: 2 core(s) for 4 ranks")


def test_lists_of_cores_are_read_and_written_as_the_kernel_does():
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("\n") == []
    assert shorten_cores([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert shorten_cores([]) == ""


def test_gpus_are_found_by_index_and_uuid_in_cudas_order():
    assert visible_gpus(LISTING, None) == ["00000000:17:00.0", "00000000:65:00.0", "00000001:CA:00.0"]
    assert visible_gpus(LISTING, "2,GPU-aa") == ["00000001:CA:00.0", "00000000:17:00.0"]
    assert visible_gpus(LISTING, "MIG-1") == [""]


def test_the_topology_is_read_from_sysfs_and_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    put("devices/system/node/node0/cpulist", "0-1,4-5")
    put("devices/system/node/node1/cpulist", "2-3,6-7")
    for cpu in range(8):
        put(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    put("bus/pci/devices/0000:17:00.0/numa_node", "1")
    put("bus/pci/devices/0000:65:00.0/numa_node", "-1")  # a machine with one node
    put("bus/pci/devices/0001:ca:00.0/numa_node", "0")
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = read_topology(None, gpus=True, sysfs=tmp_path)
    assert found.numa_cores == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert found.first_threads == {cpu: cpu % 4 for cpu in range(8)}
    assert found.gpu_nodes == (1, None, 0)
    assert read_topology("2,0", gpus=True, sysfs=tmp_path).gpu_nodes == (0, 1)
    assert read_topology(None, gpus=False, sysfs=tmp_path).gpu_nodes == ()
    driver.unlink()
    assert read_topology(None, gpus=True, sysfs=tmp_path).gpu_nodes == ()


def test_the_mask_of_the_job_limits_this_machines_topology():
    program = (
        "import os; from trainer.agent.fork_server.rank_binding import *;"
        "own = os.sched_getaffinity(0);"
        "print(bind_ranks(Place(first=0, count=1, total=1), own, read_topology(None, gpus=False))[0])"
    )
    core = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"[[{core}]]"
