"""State sets, control of the page cache, and interleaved measurements of both sides."""

import ctypes
import mmap
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor

_WORDS = {"BIG": (64, 1 << 20), "SMALL": (4000, 1 << 14)}
_KINDS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")


@dataclass
class BenchmarkState:
    """Tensors that change slightly before every save, as in training."""

    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        self._steps = count(1)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def next_step(self) -> int:
        """Advance one step: a value of every tensor changes, and so does its digest."""
        with torch.no_grad():
            torch._foreach_add_([tensor[:1] for tensor in self.tensors.values()], 0.001)
        return next(self._steps)

    def blank(self) -> dict[str, Tensor]:
        return {key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()}


def state(set_name: str, scale: float = 1.0) -> BenchmarkState:
    """Return the set of this name; `scale` is the share of its tensors to make."""
    number, words = _WORDS[set_name]
    draw = torch.Generator().manual_seed(number)
    names = (kind.format(f"layers.{index:05d}.weight") for index in count() for kind in _KINDS)
    tensors = {key: torch.randn(words, generator=draw) for key in islice(names, max(3, int(number * scale)))}
    return BenchmarkState(tensors)


_MOST_LEFT = 0.01


def drop(files: Iterable[Path]) -> None:
    """Drop `files` from the page cache; raises RuntimeError if the kernel keeps more than 1 %."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left = resident(descriptor)
        finally:
            os.close(descriptor)
        if left > _MOST_LEFT:
            raise RuntimeError(f"{path} stays in the page cache ({left:.0%}): a cold number cannot be taken here")


def warm(files: Iterable[Path]) -> None:
    """Read `files` once, so that they are in the page cache."""
    block = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def resident(descriptor: int) -> float:
    """Return the share of a file's pages in the page cache."""
    size = os.fstat(descriptor).st_size
    if size < mmap.PAGESIZE:
        return 0.0  # a file smaller than a page is not conclusive
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found
        )
        del first
        if status:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in found) / pages


LIMIT, OURS = "limit", "ours"
"""A limit that can be reached in several ways has several sides: `limit`, `limit, two threads`; the best counts."""

Side = Callable[[], float]
"""Function that performs its task once and returns its seconds, without set-up and clean-up."""


def interleaved_medians(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """Return the median of each side over `rounds`, after a warm-up round; `limit` is the fastest of several limits.

    Limits, ours, limits (A/B/A), then the peers; every second round runs in the opposite order.
    """
    limits = [name for name in sides if name.startswith(LIMIT)]
    order = [*limits, OURS, *limits, *(name for name in sides if name not in (*limits, OURS))]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            times[name].append(sides[name]())
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, LIMIT: min(medians[name] for name in limits)}


def peers(medians: Mapping[str, float]) -> dict[str, float]:
    """Return all sides except ours and the limits."""
    return {name: value for name, value in medians.items() if name != OURS and not name.startswith(LIMIT)}
