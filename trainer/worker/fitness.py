"""What a rank measures of its node and network before the first step: fixed work, under a second."""

import time
from collections.abc import Callable
from socket import socket

import torch
import torch.distributed as dist

from trainer.contract.config import JobConfig
from trainer.contract.rank import RankSpec, say

_TRIES = 3
_SIDE = {"cpu": 384, "cuda": 4096}
_COPIED = 64 << 20
_EXCHANGED = {"cpu": 8 << 20, "cuda": 64 << 20}


def measure(spec: RankSpec, config: JobConfig, control: socket, device: torch.device) -> None:
    """Measure and tell the agent, where that is wanted: in the first generation, and when a node is new to the ranks.

    Collective over the world when it has several ranks. The part on GPUs has not run on one yet.
    """
    if not config.recovery.preflight.on or not spec.fit:
        return
    began = time.monotonic()
    matmul, memory = _matmul(device), _memory(device)
    pairs: list[list[float]] = []
    alone = spec.world_size == 1
    for partner in [] if alone else partners(spec.rank, spec.world_size, spec.local_world_size):
        seconds = _exchange(spec, partner, device)
        if partner >= 0:
            pairs.append([partner, seconds])
    say(control, "fitness", matmul=matmul, memory=memory, pairs=pairs, seconds=time.monotonic() - began)


def partners(rank: int, world: int, local_world: int) -> list[int]:
    """With whom a rank exchanges data, round after round; -1: with nobody. Both of a pair meet in the same round.

    The first rank of every node meets the nodes on both sides of its own in the ring of all nodes, so that of two that
    are slow together the bad one is known. In the last round ranks meet a neighbour within their node.
    """
    node, local = divmod(rank, local_world)
    nodes = world // local_world
    rounds = 2 + nodes % 2  # an odd ring does not close in two
    between = [_beside(node, nodes, turn) if local == 0 else -1 for turn in range(rounds)]
    within = _beside(local, local_world, 0)
    return [
        *(other * local_world if other >= 0 else -1 for other in between),
        node * local_world + within if within >= 0 else -1,
    ]


def _beside(one: int, count: int, turn: int) -> int:
    """The other of a pair when a ring is cut into pairs from `turn` on; -1 for the one that is left over."""
    other = (one - turn) % count ^ 1
    return (other + turn) % count if other < count else -1


def _matmul(device: torch.device) -> float:
    """Floating-point operations a second in one matrix product."""
    side = _SIDE[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.full((side, side), 0.5, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _best(lambda: torch.mm(left, right), device, clock=_own_clock(device))


def _memory(device: torch.device) -> float:
    """Bytes read and written a second in one large copy."""
    source = torch.zeros(_COPIED // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _best(lambda: target.copy_(source), device, clock=_own_clock(device))


def _own_clock(device: torch.device) -> Callable[[], float]:
    """Of one thread on a CPU: its running time, so that it does not count when others have the core."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _best(
    work: Callable[[], object],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of the fastest of a few; the first one warms up and is left out."""
    work()
    seconds = []
    for _ in range(_TRIES):
        before()
        _settled(device)
        begin = clock()
        work()
        _settled(device)
        seconds.append(clock() - begin)
    return max(min(seconds), 1e-9)


def _exchange(spec: RankSpec, partner: int, device: torch.device) -> float:
    """Seconds for both of a pair to send each other some data; a rank without a partner sends it to itself.

    WARNING: one collective for all, not messages between two: those would count as collectives that other ranks have
    left out, and so does whoever looks for the cause of a hang later.
    """
    ours = torch.zeros(_EXCHANGED[device.type] // 4, dtype=torch.float32, device=device)
    theirs = torch.empty_like(ours)
    shares = [0] * spec.world_size
    shares[partner if partner >= 0 else spec.rank] = len(ours)

    def both_ways() -> None:
        dist.all_to_all_single(theirs, ours, shares, shares)

    # The barrier keeps a slow pair's time out of the others' next try.
    return _best(both_ways, device, before=dist.barrier)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
