"""Datasets inside DataLoader workers: samples with numbers, and streams of which each worker keeps a share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from trainer.worker.data import mix
from trainer.worker.program.sample_order import Position, SampleShare, seed_host_generators
from trainer.worker.workload import WorkloadError


class NumberedSamples(Dataset[Any]):
    """Map-style dataset read by pairs of a sample's number and its index.

    In a worker, the number seeds the random generators, so that augmentations do not depend on ranks or restarts. The
    process of the rank has generators of its own, which checkpoints contain.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, item: tuple[int, Any]) -> Any:
        number, index = item
        self._begin(number)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def _begin(self, number: int) -> None:
        if get_worker_info() is not None:
            seed_host_generators(mix(mix(self.seed) ^ number) >> 1)


class NumberedBatches(NumberedSamples):
    """A dataset that reads whole batches. Their first number seeds the generators."""

    def __getitems__(self, items: list[tuple[int, Any]]) -> Any:
        self._begin(items[0][0])
        return self.dataset.__getitems__([index for _, index in items])


class SharedStream(IterableDataset[Any]):
    """This rank's batches of a stream that every rank and worker reads in the same order.

    Yields the position after the global batch, and the batch. The dataset sees one reader, because a split between
    workers would make the order depend on their number.
    """

    def __init__(
        self, dataset: Any, at: Position, share: SampleShare, batch_size: int | None, seed: int,
        collate: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        """Describe the share. If `batch_size` is None, each batch is one sample."""
        self._dataset, self._at, self._share, self._batch_size = dataset, at, share, batch_size
        self._seed, self._collate = seed, collate

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        size, share = self._share.size * (self._batch_size or 1), self._share
        with _only_reader():
            own: list[Any] = []
            for number, (at, sample) in enumerate(self._samples(seeded=info is not None)):
                batch, place = divmod(number, size)
                mine = batch % workers == worker
                if mine and place % share.size == share.rank:
                    own.append(sample)
                if mine and place == size - 1:
                    after = (at.epoch, at.index + 1, at.consumed + 1)
                    yield after, self._collate(own[0] if self._batch_size is None else own)
                    own = []

    def _samples(self, *, seeded: bool) -> Iterator[tuple[Position, Any]]:
        """Yield every sample of all ranks from the position on, epoch after epoch."""
        epoch, skip, consumed = self._at.epoch, self._at.index, self._at.consumed
        while True:
            found = 0
            for index, sample in self._epoch(epoch, skip, consumed if seeded else None):
                yield Position(epoch=epoch, index=index, consumed=consumed), sample
                found, consumed = found + 1, consumed + 1
            if not found and not skip:
                raise WorkloadError(f"orch.batches: the dataset yields nothing in epoch {epoch}")
            epoch, skip = epoch + 1, 0

    def _epoch(self, epoch: int, skip: int, number: int | None) -> Iterator[tuple[int, Any]]:
        seeks = skip > 0 and can_seek(self._dataset)
        dataset = self._dataset.skip(skip) if seeks else self._dataset
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)  # the rest that `skip` returns may have forgotten it
        stream = iter(dataset)
        for _ in range(0 if seeks else skip):
            next(stream, None)
        index = skip
        while True:
            if number is not None:
                seed_host_generators(mix(mix(self._seed) ^ (number + index - skip)) >> 1)
            try:
                sample = next(stream)
            except StopIteration:
                return
            yield index, sample
            index += 1


def can_seek(dataset: Any) -> bool:
    """Return whether the stream can start later by itself, as `datasets` of Hugging Face can."""
    return callable(getattr(dataset, "skip", None))


@contextmanager
def _only_reader() -> Iterator[None]:
    """Hide the number of workers from the dataset."""
    info, loader_worker._worker_info = loader_worker._worker_info, None
    try:
        yield
    finally:
        loader_worker._worker_info = info
