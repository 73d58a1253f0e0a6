"""One rank of an ordinary DDP loop that takes half of its steps without the hooks of orch's start-up module.

    PYTHONPATH=.../trainer/agent/instrument/python_path ORCH_CELLS=... RANK=...
        python benchmarks/instrumented_loop.py WIDTH BATCH ROUNDS PAIRS

Of each pair of blocks, one is bare and the other is instrumented, in an order that all ranks draw from one seed. Rank 0
writes one line per round as JSON: the median seconds of both kinds, and the median difference of the training thread's
CPU seconds within a pair, which peers and other programs do not change.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as loaders

_WARM_STEPS, _BLOCK = 30, 5


class _Batches(IterableDataset[torch.Tensor]):
    """Endless batches that cost nothing."""

    def __init__(self, width: int, batch: int) -> None:
        self._data = torch.randn(batch, width)

    def __iter__(self) -> Any:
        while True:
            yield self._data


class Hooks:
    """The hooks of the start-up module, which can be taken out of torch and put back."""

    def __init__(self) -> None:
        places: tuple[tuple[Any, str], ...] = ((torch.autograd, "backward"), (loaders._BaseDataLoaderIter, "__next__"))
        self._places = [(place, name, getattr(place, name)) for place, name in places]
        self._tables: tuple[dict[int, Any], ...] = (
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )
        self._entries = [dict(table) for table in self._tables]
        if not all(self._entries) or not all(hasattr(function, "__wrapped__") for _, _, function in self._places):
            raise SystemExit("this program is not instrumented")

    def remove(self) -> None:
        for place, name, function in self._places:
            setattr(place, name, function.__wrapped__)
        for table in self._tables:
            table.clear()

    def restore(self) -> None:
        for place, name, function in self._places:
            setattr(place, name, function)
        for table, entries in zip(self._tables, self._entries, strict=True):
            table.update(entries)


def main(width: int, batch: int, rounds: int, pairs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(_Batches(width, batch), batch_size=None))

    def step() -> None:
        loss = model(next(batches)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    hooks, order = Hooks(), random.Random(3)
    for _ in range(_WARM_STEPS):
        step()
    for _ in range(rounds):
        taken: dict[str, list[float]] = {"bare": [], "instrumented": []}
        spent: dict[str, list[float]] = {"bare": [], "instrumented": []}
        for _ in range(pairs):
            for kind in order.sample(sorted(taken), 2):
                (hooks.remove if kind == "bare" else hooks.restore)()
                step()  # Python looks changed attributes up again
                steps = [_time_step(step) for _ in range(_BLOCK)]
                taken[kind].append(statistics.median(seconds for seconds, _ in steps))
                spent[kind].append(statistics.median(cpu for _, cpu in steps))
        if dist.get_rank() == 0:
            more = [one - other for one, other in zip(spent["instrumented"], spent["bare"], strict=True)]
            medians = {kind: statistics.median(seconds) for kind, seconds in taken.items()}
            print(json.dumps({**medians, "more_cpu": statistics.median(more)}), flush=True)
    dist.destroy_process_group()


def _time_step(step: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    began, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - began, time.thread_time() - cpu


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
