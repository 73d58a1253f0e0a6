"""Latency and bandwidth of collectives and of point-to-point messages."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer.protocol.probe import CollectiveRate

Group = dist.ProcessGroup
POINT_TO_POINT = "point-to-point"
_FEWEST, _MOST = 3, 1000

# torch 2.13 deprecates the names that older versions have.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    POINT_TO_POINT: lambda ranks: 1.0,
}
"""Share of the message that crosses each link (nccl-tests, doc/PERFORMANCE.md). The message is the whole tensor."""


def measure_collectives(
    scope: str, group: Group, sizes: tuple[int, ...], seconds: float, device: torch.device
) -> Iterator[CollectiveRate]:
    """Yield the rates of this group, on each of its ranks. All groups of a scope measure at the same time. Collective.

    A rate is that of the slowest rank in the world, over the whole loop, as nccl-tests reports it.
    """
    ranks = dist.get_world_size(group)
    for operation, factor in _BUS_FACTORS.items():
        for nbytes in sizes:
            elements = max(ranks, nbytes // 4 // ranks * ranks)
            taken = _slowest(_time(_operation(operation, group, elements, device), seconds, device), device)
            taken /= 2 if operation == POINT_TO_POINT else 1  # there and back
            yield CollectiveRate(
                scope=scope, operation=operation, ranks=ranks, bytes=4 * elements, seconds=taken,
                bus_bytes_per_s=4 * elements * factor(ranks) / taken,
            )  # fmt: skip


def _operation(name: str, group: Group, elements: int, device: torch.device) -> Callable[[], None]:
    ranks = dist.get_world_size(group)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    if name == "all-reduce":
        return lambda: _wait(dist.all_reduce(whole, group=group, async_op=True))
    if name == "all-gather":
        return lambda: _wait(_ALL_GATHER(whole, part, group=group, async_op=True))
    if name == "reduce-scatter":
        return lambda: _wait(_REDUCE_SCATTER(part, whole, group=group, async_op=True))
    return _pass_around(whole, group)


def _wait(work: Any) -> None:
    work.wait()


def _pass_around(message: torch.Tensor, group: Group) -> Callable[[], None]:
    """Return a function that sends a message from the group's first rank to its last one and back."""
    me, last = dist.get_rank(group), dist.get_world_size(group) - 1
    peer = dist.get_global_rank(group, last if me == 0 else 0)

    def there_and_back() -> None:
        if me == 0:
            dist.send(message, peer, group=group)
            dist.recv(message, peer, group=group)
        elif me == last:
            dist.recv(message, peer, group=group)
            dist.send(message, peer, group=group)

    return there_and_back


def _time(run: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Return the mean time of repetitions; every rank makes the same number."""
    run()
    expected = max(_loop(run, _FEWEST, device), 1e-6)
    count = torch.tensor([min(_MOST, max(_FEWEST, int(seconds / expected)))], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return _loop(run, int(count.item()), device)


def _loop(run: Callable[[], None], count: int, device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(mean: float, device: torch.device) -> float:
    taken = torch.tensor([mean], dtype=torch.float64, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.item())
