"""The probe's program with real ranks, and its rates beside plain measurements of the same files."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from checkpointing.storage.durable import dump_line, read_json
from tests.slurm.lab import _free_ports
from trainer.protocol.plain_data import build
from trainer.protocol.probe import RESULT, ProbeOrder, ProbePlace, ProbeResult
from trainer.worker.probe.main import _NETWORK
from trainer.worker.probe.storage_rates import largest_files, read_rate, scratch_folder, write_rate

SIZES = (1 << 10, 1 << 16)


def run_probe(folder: Path, order: ProbeOrder, ranks: int, local: int) -> ProbeResult:
    (folder / "order.json").write_text(dump_line(asdict(order)))
    (port,) = _free_ports(1)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.worker.probe.main", str(folder / "order.json")],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank % local)},
        )
        for rank in range(ranks)
    ]
    assert [child.wait(timeout=240) for child in children] == [0] * ranks
    return build(ProbeResult, read_json(folder / RESULT))


@pytest.mark.multi
def test_four_ranks_on_two_nodes_measure_every_scope_and_place(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "shard").write_bytes(os.urandom(3 << 20))
    places = (
        ProbePlace(name="data.path", path=str(data), read_only=True),
        ProbePlace(name="run root", path=str(tmp_path / "root")),
        ProbePlace(name="tier /proc/none", path="/proc/none"),
    )
    folder = tmp_path / "order"
    folder.mkdir()
    order = ProbeOrder(
        folder=str(folder), places=places, message_bytes=SIZES, file_bytes=4 << 20, files=5, seconds=0.01
    )  # fmt: skip
    result = run_probe(folder, order, 4, 2)
    assert (result.nodes, result.ranks, result.backend, result.transport) == (2, 4, "gloo", "gloo, TCP on lo")
    measured = {(one.scope, one.operation, one.bytes): one for one in result.collectives}
    operations = ("all-reduce", "all-gather", "reduce-scatter", "point-to-point")
    assert set(measured) == {
        (scope, operation, size)
        for scope in ("world", "within nodes", "between nodes") for operation in operations for size in SIZES
    }  # fmt: skip
    one = measured["world", "all-reduce", SIZES[1]]
    assert one.ranks == 4
    assert one.bus_bytes_per_s == pytest.approx(SIZES[1] * 1.5 / one.seconds)
    rates = {(rate.place, rate.nodes): rate for rate in result.storage}
    assert set(rates) == {(place.name, nodes) for place in places for nodes in (1, 2)}
    for nodes in (1, 2):
        root, shard = rates["run root", nodes], rates["data.path", nodes]
        assert min(root.write_bytes_per_s or 0, root.read_bytes_per_s or 0, root.metadata_per_s or 0) > 0
        assert (shard.write_bytes_per_s, shard.bytes) == (None, 3 << 20)
        assert shard.read_bytes_per_s
        assert "/proc/none" in rates["tier /proc/none", nodes].error
    assert list((tmp_path / "root").iterdir()) == []
    assert sorted(path.name for path in folder.iterdir()) == ["order.json", RESULT]
    assert [path.name for path in data.iterdir()] == ["shard"]


def test_what_is_read_is_bounded_and_the_largest_files_come_first(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 5 << 20), ("middle", 1 << 20)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert [path.name for path in largest_files(tmp_path, 6 << 20)] == ["large", "middle"]
    assert [path.name for path in largest_files(tmp_path, 1)] == ["large"]
    rate, nbytes = read_rate([tmp_path / "middle", tmp_path / "small"], 1 << 30)
    assert rate > 0
    assert nbytes == (1 << 20) + 10


def test_scratch_folders_are_removed_even_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch_folder(tmp_path / "new") as folder:
            assert write_rate(folder, 1 << 20) > 0
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "network"),
    [
        ("gpu1:12:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.2<0>", "[0]mlx5_0:1/IB [RO]"),
        ("gpu1:12:12 [0] NCCL INFO Using network Socket", "Socket"),
        ("gpu1:12:12 [0] NCCL INFO Using network AWS Libfabric", "AWS Libfabric"),
    ],
)
def test_ncclcs_log_names_the_network(line: str, network: str) -> None:
    assert network in _NETWORK.findall(line)[-1]
    assert json.dumps(line)
