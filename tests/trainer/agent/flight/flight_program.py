"""Real gloo ranks that go wrong on purpose: reads {kind, world, run_dir, sockets} lines, and forks the ranks of each.

Forks `world` ranks (two groups of neighbours and two of opposites besides the world, as tensor and data parallel make
them), which go three rounds through all groups, and then do as `kind` says. Prints {rank: pid}, `ready` when every rank
is about to go wrong, and, after a line `wait` (else they are killed), {rank: exit code}.
"""

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.protocol.messages.ranks import RankSpec
from trainer.worker.reporting import flight_recorder

BAD = 2
"""The rank that goes wrong."""


def spec_of(rank: int, world: int, run_dir: str, sockets: str) -> RankSpec:
    return RankSpec(
        run_dir=run_dir, attempt=1, generation=1, rank=rank, local_rank=rank, world_size=world, local_world_size=world,
        node=0, node_name="n0", cell_fd=-1, control_fd=-1, host="127.0.0.1", flight=f"{sockets}/{rank}.1",
    )  # fmt: skip


def go_wrong(kind: str, rank: int, bits: list[torch.Tensor], groups: tuple[dist.ProcessGroup, ...]) -> None:
    neighbours, _ = groups
    one, bad = bits[0], rank == BAD
    match kind:
        case "absent" if bad:
            time.sleep(1000)
        case "stopped" if bad:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "locked" if bad:
            ctypes.PyDLL(None).sleep(1000)
        case "inner":  # one never comes to its neighbour's collective; the rest wait further out
            if bad:
                time.sleep(1000)
            dist.all_reduce(one, group=neighbours)
        case "shape":
            dist.all_reduce(torch.ones(900 if bad else 4))
        case "order" if bad:
            dist.broadcast(one, 0)
        case "raises" if bad:
            raise ValueError("my own fault")
    dist.all_reduce(one)
    dist.all_reduce(one)


def rank_of(kind: str, rank: int, world: int, run_dir: str, sockets: str, ready: int) -> None:
    spec = spec_of(rank, world, run_dir, sockets)
    error: BaseException | None = None
    with flight_recorder.recording(spec):
        store = dist.FileStore(f"{sockets}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        half = world // 2
        near = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(half)][rank // 2]
        far = [dist.new_group([place, place + 2]) for place in range(2)][rank % 2] if world == 4 else near
        flight_recorder.write_groups(spec)
        bits = [torch.ones(4) for _ in range(3)]
        for _ in range(3):
            dist.all_reduce(bits[0], group=near)
            dist.all_reduce(bits[1], group=far)
            dist.all_reduce(bits[2])
        os.write(ready, b".")
        try:
            go_wrong(kind, rank, bits, (near, far))
        except (RuntimeError, ValueError) as caught:
            error = caught
            flight_recorder.dump(spec, error)
    os._exit(0 if error is None else 1)


def play(kind: str, world: int, run_dir: str, sockets: str) -> None:
    read, write = os.pipe()
    pids = {}
    for rank in range(world):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            rank_of(kind, rank, world, run_dir, sockets, write)
    say = sys.stdout.write
    say(json.dumps(pids) + "\n")
    seen = 0
    while seen < world:
        seen += len(os.read(read, world))
    os.close(read)
    os.close(write)
    say("ready\n")
    sys.stdout.flush()
    command = sys.stdin.readline()
    codes = {}
    for rank, pid in pids.items():
        if command != "wait\n":
            os.kill(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    say(json.dumps(codes) + "\n")
    sys.stdout.flush()


def main() -> None:
    while line := sys.stdin.readline():
        play(**json.loads(line))


if __name__ == "__main__":
    main()
