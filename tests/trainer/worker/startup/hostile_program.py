"""Two processes: a rank that joins normally, and a stranger that found its store and poses as its peer.

Arguments: `victim CONTROL_FD` or `stranger PORT CANARY`, where PORT is what any user of the
host reads in /proc/net/tcp. First the rank is rank 0 and hosts the store, then the stranger is, as rank 0: both
directions of every exchange are met. The victim prints one JSON line: what each exchange gave or raised.
"""

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.engine.collectives.group import RankGroup
from trainer.protocol.messages.ranks import RankSpec
from trainer.worker.startup import rendezvous

PATIENCE = timedelta(seconds=300)
FORGED = b'"forged"'


class Order:
    """Runs a command when unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def spec(rank: int) -> RankSpec:
    return RankSpec(
        run_dir="/", attempt=1, generation=1, rank=rank, local_rank=rank, world_size=2, local_world_size=2, node=0,
        node_name="n0", cell_fd=-1, control_fd=-1, host="127.0.0.1",
    )  # fmt: skip


# ---- the rank


def outcome(act: Callable[[], Any]) -> str:
    try:
        return f"took {act()!r}"
    except Exception as error:  # noqa: BLE001  what it is, is asserted
        return f"{type(error).__name__}: {error}"


def victim(control: socket.socket) -> dict[str, str]:
    found = {}
    for rank, exchanges in ((0, ("gather", "all_gather")), (1, ("broadcast", "scatter"))):
        _, key = rendezvous.join(spec(rank), control, torch.device("cpu"))
        for number in range(2):
            for name in exchanges:
                ranks = RankGroup(None, key=key)
                value = "honest" if rank == 0 else None
                found[f"{name} {number}"] = outcome(
                    lambda ranks=ranks, name=name, value=value: getattr(ranks, name)(value)
                )
        dist.destroy_process_group()
    return found


# ---- the stranger, which speaks as a peer does but for the key


def sizes(group: Any, mine: int) -> list[int]:
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(told, torch.tensor([mine]), group=group)
    return [int(size) for size in told]


def room(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def as_peer(group: Any, name: str, data: bytes) -> None:
    most = max(sizes(group, len(data)))
    if name == "gather":
        dist.gather(room(data, most), None, group=group, group_dst=0)
    else:
        dist.all_gather([room(b"", most), room(b"", most)], room(data, most), group=group)


def as_leader(group: Any, name: str, data: bytes) -> None:
    count = 1 if name == "broadcast" else 2
    dist.broadcast(torch.tensor([len(data)] * count), group=group, group_src=0)
    if name == "broadcast":
        dist.broadcast(room(data, len(data)), group=group, group_src=0)
    else:
        dist.scatter(room(b"", len(data)), [room(data, len(data))] * 2, group=group, group_src=0)


def joined(store: dist.Store, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=2, timeout=PATIENCE)


def stranger(port: int, canary: str) -> None:
    payloads = [pickle.dumps(Order(f"echo unpickled >> {canary}")), bytes(32) + FORGED]
    joined(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE), rank=1)
    attack(("gather", "all_gather"), as_peer, payloads)
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    joined(store, rank=0)
    attack(("broadcast", "scatter"), as_leader, payloads)
    sys.stdin.read()  # the store goes with this process


def attack(names: tuple[str, ...], speak: Callable[[Any, str, bytes], None], payloads: list[bytes]) -> None:
    for data in payloads:
        for name in names:
            speak(dist.new_group(backend="gloo"), name, data)


def main() -> None:
    if sys.argv[1] == "stranger":
        stranger(int(sys.argv[2]), sys.argv[3])
        return
    with socket.socket(fileno=int(sys.argv[2])) as control:
        found = victim(control)
        control.send(json.dumps(found).encode())
