"""Short, time-limited benchmark of a rank's node and network before the first step."""

import time
from collections.abc import Callable
from socket import socket

import torch
import torch.distributed as dist

from trainer.protocol.config import JobConfig
from trainer.protocol.messages.ranks import RankSpec, Speeds, send_message

_REPEATS = 3
_MATRIX_SIDE = {"cpu": 384, "cuda": 4096}
_COPY_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
_EXCHANGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


def measure(spec: RankSpec, config: JobConfig, control: socket, device: torch.device) -> None:
    """If enabled, measure this node and report to its agent. Collective. Not yet tested on a GPU."""
    if not config.detection.preflight.on or not spec.fit:
        return
    began = time.monotonic()
    matmul, memory = _matmul(device), _memory(device)
    alone = spec.world_size == 1
    pairs = [] if alone else _exchanges(spec, _TimeBudget(began, config.detection.preflight.seconds, device), device)
    send_message(control, Speeds(matmul=matmul, memory=memory, pairs=tuple(pairs)))


class _TimeBudget:
    """Agreement between all ranks, before each try, on whether the slowest rank has enough time left."""

    def __init__(self, began: float, seconds: float, device: torch.device) -> None:
        self._began, self._seconds, self._device = began, seconds, device
        self._last, self._longest = time.monotonic(), 0.0

    def allows_another(self) -> bool:
        """Return whether there is time for a try as long as the longest so far. Collective."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        until = torch.tensor([now - self._began + self._longest], dtype=torch.float64, device=self._device)
        dist.all_reduce(until, op=dist.ReduceOp.MAX)
        self._last = time.monotonic()
        return float(until.item()) <= self._seconds


def _exchanges(spec: RankSpec, budget: _TimeBudget, device: torch.device) -> list[tuple[int, float]]:
    pairs: list[tuple[int, float]] = []
    for partner in partners(spec.rank, spec.world_size, spec.local_world_size):
        if not budget.allows_another():
            break
        seconds = _exchange(spec, partner, device, budget)
        if partner >= 0:
            pairs.append((partner, seconds))
    return pairs


def partners(rank: int, world: int, local_world: int) -> list[int]:
    """Return the partner of a rank in every round, or -1 for a round without a partner.

    The first rank of each node exchanges data with both neighbors in the ring of nodes. In the last round, ranks on the
    same node exchange data.
    """
    node, local = divmod(rank, local_world)
    nodes = world // local_world
    rounds = 2 + nodes % 2  # an odd-sized ring needs a third round
    between = [_ring_neighbour(node, nodes, turn) if local == 0 else -1 for turn in range(rounds)]
    within = _ring_neighbour(local, local_world, 0)
    return [
        *(other * local_world if other >= 0 else -1 for other in between),
        node * local_world + within if within >= 0 else -1,
    ]


def _ring_neighbour(one: int, count: int, turn: int) -> int:
    """Return a member's partner when a ring is split into pairs, starting at `turn`; -1 for an unpaired member."""
    other = (one - turn) % count ^ 1
    return (other + turn) % count if other < count else -1


def _matmul(device: torch.device) -> float:
    side = _MATRIX_SIDE[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.full((side, side), 0.5, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _best(lambda: torch.mm(left, right), device, clock=_choose_clock(device))


def _memory(device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device, clock=_choose_clock(device))


def _choose_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock. On a CPU with one thread, it is CPU time, which excludes other processes on the core."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _best(
    work: Callable[[], object],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
    go_on: Callable[[], bool] = lambda: True,
) -> float:
    """Return the seconds of the fastest of a few tries. The warm-up counts only if there is no time for more."""
    seconds = [_measure_seconds(work, device, clock)]
    for tried in range(_REPEATS):
        if not go_on():
            break
        if tried == 0:
            seconds.clear()
        seconds.append(_measure_seconds(work, device, clock))
    return max(min(seconds), 1e-9)


def _measure_seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    _synchronize(device)
    begin = clock()
    work()
    _synchronize(device)
    return clock() - begin


def _exchange(spec: RankSpec, partner: int, device: torch.device, budget: _TimeBudget) -> float:
    """Return the seconds a pair needs to exchange data. A rank without a partner sends to itself.

    This uses a collective, because hang analysis would count messages between two ranks as skipped collectives.
    """
    ours = torch.zeros(_EXCHANGE_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    theirs = torch.empty_like(ours)
    shares = [0] * spec.world_size
    shares[partner if partner >= 0 else spec.rank] = len(ours)

    def both_ways() -> None:
        dist.all_to_all_single(theirs, ours, shares, shares)

    return _best(both_ways, device, go_on=budget.allows_another)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
