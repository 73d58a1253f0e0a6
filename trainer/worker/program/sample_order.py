"""One global number for every sample of every epoch, and the samples that each rank takes."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainer.worker.data import Permutation, mix
from trainer.worker.workload import WorkloadError


@dataclass(frozen=True, kw_only=True)
class Position:
    """Next sample in the order that all ranks share: an epoch, an index in it, and the samples read before."""

    epoch: int = 0
    index: int = 0
    consumed: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleShare:
    """This rank's index among the ranks that read different samples, and their number."""

    rank: int = 0
    size: int = 1


class SampleOrder:
    """Order of a map-style dataset's samples, as a function of seed and epoch. Its items are what a sampler yields."""

    def __init__(self, loader: "DataLoader[Any]", seed: int, shuffle: bool | None) -> None:
        """Raise WorkloadError for a sampler that has already split the samples between ranks."""
        inner = loader.batch_sampler
        by_batch = inner is not None and not _cuts_batches(inner)
        sampler: Any = inner if by_batch else inner.sampler if isinstance(inner, BatchSampler) else loader.sampler
        self.batch_size = 1 if by_batch or inner is None else int(inner.batch_size)  # type: ignore[attr-defined]
        self.yields_batches = by_batch
        self._samples, self._seed, self._sampler = len(loader.dataset), seed, sampler  # type: ignore[arg-type]
        self._list: tuple[int, Sequence[Any]] = (-1, ())
        if isinstance(sampler, DistributedSampler):
            self._seed = seed or sampler.seed
        elif hasattr(sampler, "num_replicas"):
            raise WorkloadError(
                f"orch.batches: {type(sampler).__name__} splits the samples between ranks, so their order cannot "
                "continue on another number of ranks: pass a loader without it, and `shuffle=True` if needed"
            )
        self._shuffle = _shuffles(sampler) if shuffle is None else shuffle
        if self._samples < 1:
            raise WorkloadError("orch.batches: the dataset is empty")

    def length(self, epoch: int) -> int:
        """Return the number of items in an epoch."""
        return self._samples if self._shuffle is not None else len(self._items(epoch))

    def item(self, epoch: int, index: int) -> Any:
        """Return what the sampler yields at this place."""
        if self._shuffle is None:
            return self._items(epoch)[index]
        return Permutation(self._samples, mix(self._seed) ^ epoch)[index] if self._shuffle else index

    def advance(self, at: Position, count: int) -> Position:
        """Return the position `count` items later."""
        epoch, index = at.epoch, at.index + count
        while index >= self.length(epoch):
            index, epoch = index - self.length(epoch), epoch + 1
        return Position(epoch=epoch, index=index, consumed=at.consumed + count)

    def batches(self, at: Position, share: SampleShare) -> Iterator[list[tuple[int, Any]]]:
        """Yield this rank's batches from this position on, without end, as numbers and items.

        Of each global batch, it takes the items rank, rank + size, ...
        """
        while True:
            own = (self.advance(at, share.rank + share.size * place) for place in range(self.batch_size))
            yield [(one.consumed, self.item(one.epoch, one.index)) for one in own]
            at = self.advance(at, share.size * self.batch_size)

    def _items(self, epoch: int) -> Sequence[Any]:
        """Return all items of a custom sampler, drawn with generators that depend only on seed and epoch."""
        if self._list[0] != epoch:
            number = mix(mix(self._seed) ^ epoch) >> 1
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
                generator.manual_seed(number)
            with kept_generators():
                seed_host_generators(number)
                self._list = epoch, list(self._sampler)
            if not self._list[1]:
                raise WorkloadError(f"orch.batches: {type(self._sampler).__name__} yields nothing in epoch {epoch}")
        return self._list[1]


def _cuts_batches(sampler: Any) -> bool:
    """Return whether a batch sampler only cuts another sampler's order into batches, as torch's and torchdata's do."""
    known = type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")
    return isinstance(sampler, BatchSampler) and known


def _shuffles(sampler: Any) -> bool | None:
    """Return whether the sampler shuffles, or None if its own order counts."""
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    plain = isinstance(sampler, RandomSampler) and not sampler.replacement
    return True if plain and sampler.num_samples == len(sampler.data_source) else None


def seed_host_generators(number: int) -> None:
    """Seed the generators on the host: torch's, Python's and, if it is loaded, NumPy's."""
    # torch.manual_seed would also queue a seed for every GPU, which a worker without one keeps for ever.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % (1 << 32))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the generators on the host at the end."""
    numpy = sys.modules.get("numpy")
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
