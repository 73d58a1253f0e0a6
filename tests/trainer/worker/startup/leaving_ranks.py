"""Four forked ranks that leave their world, one of them late."""

import json
import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.worker.startup import rendezvous

RANKS, LATE = 4, 2


def _be_rank(rank: int, store: TCPStore, late: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT="1")
    world = PrefixStore("world", store)
    dist.init_process_group("gloo", store=world, rank=rank, world_size=RANKS)
    destroy, hosted = dist.destroy_process_group, []

    def destroy_late() -> None:
        os.read(late, 1)  # until all others that can have exited
        destroy()
        hosted.append(world.add("late", 1))

    if rank == LATE:
        dist.destroy_process_group = destroy_late
    rendezvous.leave(world, SimpleNamespace(rank=rank, world_size=RANKS))
    os._exit(0 if hosted or rank != LATE else 1)


def main() -> None:
    late, release = os.pipe()
    port, address = os.pipe()
    children = {}
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            if rank == 0:
                store = rendezvous._host_store("127.0.0.1")
                os.write(address, b"%6d" % store.port * (RANKS - 1))
            else:
                store = TCPStore("127.0.0.1", int(os.read(port, 6)), timeout=timedelta(seconds=120))
            _be_rank(rank, store, late)
        children[rank] = child
    codes = {rank: _wait(children[rank]) for rank in (1, 3)}
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.01)  # rank 0 has no reason to exit yet; if it does, rank 2 finds no store
    os.write(release, b"x")
    codes |= {rank: _wait(children[rank]) for rank in (0, LATE)}
    sys.stdout.write(json.dumps([codes[rank] for rank in range(RANKS)]))


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
