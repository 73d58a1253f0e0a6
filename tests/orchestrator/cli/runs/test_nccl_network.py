# ruff: noqa: E501  (lines of logs)
"""The network that NCCL names in its log. The lines are from public logs, named beside them."""

from pathlib import Path

import pytest

from orchestrator.cli.runs.nccl_network import NcclNetwork, find_network, read_network

ROCE = """\
dgxh100-4:460770:460770 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
NCCL version 2.19.3+cuda12.3
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
"""  # github.com/NVIDIA/nccl-tests/issues/185
OLD = """\
master_node:24570:24907 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
master_node:24570:24907 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
NCCL version 2.5.6+cuda10.0
"""  # github.com/Mellanox/nv_peer_memory/issues/56
INFINIBAND = """\
nccl-test:179:179 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
nccl-test:179:179 [0] NCCL INFO Using network IB  # ← KEY LINE!
nccl-test:179:179 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA  # ← IB + GPUDirect!
nccl-test:179:179 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
""".replace("  # ← KEY LINE!", "")  # github.com/siderolabs/docs/issues/566
EFA = """\
NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.18.0
NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
NCCL INFO Using network AWS Libfabric
NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0
"""  # logs of aws-ofi-nccl 1.18 (p5.48xlarge) and of AWS ParallelCluster, with their own devices
OLD_EFA = """\
NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
NCCL INFO Using network AWS Libfabric
 [send] via NET/AWS Libfabric/1/GDRDMA
"""  # aws-ofi-nccl 1.6
SLINGSHOT = """\
NCCL INFO NET/OFI Using aws-ofi-rccl 1.4.0
NCCL INFO NET/OFI Selected Provider is cxi
frontier00061:695135:695311 [0] NCCL INFO Using network AWS Libfabric
frontier00061:695135:695311 [0] NCCL INFO Channel 03/0 : 0[d6000] -> 2[de000] via P2P/IPC comm 0x9bbf3b0 nRanks 4096
frontier00061:695135:695311 [0] NCCL INFO Channel 00/0 : 4092[d6000] -> 0[d6000] [receive] via NET/AWS Libfabric/2/GDRDMA comm 0x9bbf3b0
"""  # logs of LUMI and Frontier
SOCKET = """\
lab:1425048:1425048 [0] NCCL INFO NCCL version 2.29.7+cuda12.9
lab:1425048:1425048 [0] NCCL INFO NET/IB : No device found.
lab:1425048:1425048 [0] NCCL INFO NET/IB : Using [RO]; OOB enp129s0:128.114.59.195<0>
lab:1425048:1425048 [0] NCCL INFO Failed to initialize NET plugin IB
lab:1425048:1425048 [0] NCCL INFO NET/Socket : Using [0]enp129s0:128.114.59.195<0> [1]tailscale0:fe80::56c4:f535%tailscale0<0>
lab:1425048:1425048 [0] NCCL INFO Using network Socket
"""
PLUGIN = """\
vm-host40:34001:34043 [0] NCCL INFO NET/Plugin: Loaded net plugin NCCL RDMA Plugin v6 (v6)
vm-host40:34001:34043 [0] NCCL INFO NET/IB : Using [0]mlx5_bond_6:1/RoCE [1]mlx5_bond_7:1/RoCE [RO]; OOB bond0:30.159.184.22<0>
vm-host40:34001:34043 [0] NCCL INFO Using network NCCL RDMA Plugin v6
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (ROCE, "RoCE over mlx5_10, mlx5_11 (NCCL 2.19.3+cuda12.3)"),
        (OLD, "InfiniBand over mlx5_0 (NCCL 2.5.6+cuda10.0)"),
        (INFINIBAND, "InfiniBand over mlx5_0, mlx5_1, with GPUDirect RDMA"),
        (EFA, "AWS Libfabric over efa-direct x32, without GPUDirect RDMA"),
        (OLD_EFA, "AWS Libfabric over efa x4, with GPUDirect RDMA"),
        (SLINGSHOT, "AWS Libfabric over cxi, with GPUDirect RDMA"),
        (SOCKET, "TCP sockets over enp129s0, tailscale0 (NCCL 2.29.7+cuda12.9)"),
        (PLUGIN, "RoCE over mlx5_bond_6, mlx5_bond_7"),
    ],
    ids=["roce", "old", "infiniband", "efa", "old-efa", "slingshot", "socket", "plugin"],
)
def test_the_network_is_named_as_in_public_logs(log: str, words: str) -> None:
    assert str(find_network(log.splitlines())) == words


def test_the_newest_communicator_counts() -> None:
    found = find_network((INFINIBAND + SOCKET).splitlines())
    assert found is not None
    assert (found.network, found.gpudirect) == ("Socket", None)


def test_one_pair_without_gpudirect_is_reported() -> None:
    log = INFINIBAND + "x [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1\n"
    log += "x [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
    found = find_network(log.splitlines())
    assert found is not None
    assert found.gpudirect is False


def test_other_logs_name_no_network(tmp_path: Path) -> None:
    assert find_network(["step 1 loss 2.0", "see the page NET/IB : Using nothing"]) is None
    assert read_network(tmp_path / "rank-00000.log") is None


def test_the_oldest_file_of_a_rotated_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log.1").write_text(ROCE)
    (tmp_path / "rank-00000.log").write_text("step 1\n")
    assert read_network(tmp_path / "rank-00000.log") == NcclNetwork(
        network="IB", devices=("mlx5_10:1/RoCE", "mlx5_11:1/RoCE"), version="2.19.3+cuda12.3"
    )
