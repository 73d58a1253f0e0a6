"""Connections of ranks that only run the exchanges of a save, as orch opens them when training uses NCCL.

Started by `benchmarks.scale.ranks`: each rank is a process `python -m benchmarks.scale.exchange RANK WORLD PORT`.
"""

import os
import subprocess
import sys
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from checkpointing.engine.collectives.group import RankGroup

_PATIENCE = timedelta(minutes=5)


def sockets(world: int) -> list[int]:
    """Return the number of connections to peers of each rank, after every kind of exchange."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    environ = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.exchange", str(rank), str(world), str(store.port)],
            env=environ, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [int(text) for text in said]


def main(rank: int, world: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    dist.init_process_group("gloo", store=PrefixStore("world", store), rank=rank, world_size=world, timeout=_PATIENCE)
    group = RankGroup(None, key=b"k" * 32)
    values = [str(number) for number in range(world)] if group.leads else None
    for _ in range(2):
        group.gather(rank)
        group.all_gather(rank)
        group.scatter(values)
        group.broadcast(rank if group.leads else None)
        group.minimum([rank])
    found = [
        one for one in psutil.Process().net_connections(kind="tcp")
        if one.raddr and port not in (one.raddr.port, one.laddr.port)
    ]  # fmt: skip
    print(len(found), flush=True)
    group.minimum([0])  # no rank exits before all have counted
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
