"""Batches of a DataLoader with an exact position, which a restart continues on any number of ranks and workers."""

import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from trainer.worker.data import mix
from trainer.worker.program.checkpoint_place import RUN_DIR
from trainer.worker.program.sample_order import Position, SampleOrder, SampleShare
from trainer.worker.program.streams import NumberedBatches, NumberedSamples, SharedStream, can_seek
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.startup.preimport import protect_data_loader_workers
from trainer.worker.workload import WorkloadError

_KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "pin_memory_device",
)  # fmt: skip
"""Arguments of the program's loader that keep their meaning."""


class Batches:
    """Endless batches, each sample once per epoch. A batch may hold the end of an epoch and the start of the next.

    `next(batches)` crosses epochs. A `for` loop ends with the current epoch, and the next one continues.
    """

    def __init__(
        self, loader: "DataLoader[Any]", seed: int, shuffle: bool | None, data_parallel: tuple[int, int] | None
    ) -> None:
        self._loader, self._seed, self._data_parallel = loader, seed, data_parallel
        self._streams = isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__")
        self._order = None if self._streams else SampleOrder(loader, seed, shuffle)
        self._at = Position()
        self._iterator: Iterator[Any] | None = None
        self._end_workers: Callable[[], object] = _nothing

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self._at.epoch

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
            self._end_workers = weakref.finalize(self, _end_workers, self._iterator)
        if self._order is None:
            (epoch, index, consumed), batch = next(self._iterator)
            self._at = Position(epoch=epoch, index=index, consumed=consumed)
            return batch
        batch = next(self._iterator)
        self._at = self._order.advance(self._at, self._share().size * self._order.batch_size)
        return batch

    def __iter__(self) -> Iterator[Any]:
        epoch = self._at.epoch
        while self._at.epoch == epoch:
            yield next(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on every rank."""
        samples = None if self._order is None else self._order.length(0)
        return {"position": asdict(self._at), "seed": self._seed, "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises WorkloadError if the samples or their order have changed."""
        own = self.state_dict()
        for key, name in (("seed", "seed"), ("samples", "number of samples")):
            if state[key] != own[key]:
                raise WorkloadError(
                    f"orch.batches: the {name} was {state[key]} when the checkpoint was saved and is {own[key]} now: "
                    "samples would be read twice or skipped"
                )
        self._end_workers()
        self._at, self._iterator = Position(**state["position"]), None

    def _share(self) -> SampleShare:
        """Return which samples are this rank's."""
        if self._data_parallel is not None:
            rank, size = self._data_parallel
            return SampleShare(rank=rank, size=size)
        if dist.is_initialized():
            return SampleShare(rank=dist.get_rank(), size=dist.get_world_size())
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise WorkloadError("orch.batches: call init_process_group before the first batch, or give data_parallel=")
        return SampleShare()

    def _open(self) -> Iterator[Any]:
        """Start reading at the position."""
        if RUN_DIR in os.environ:
            protect_data_loader_workers()
        loader, share = self._loader, self._share()
        # Opening a loader draws a number, which must not come from the generator that dropout uses.
        generator = torch.Generator().manual_seed(mix(self._seed) >> 1)
        kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        if self._order is None:
            stream = self._stream(share)
            return iter(DataLoader(stream, batch_size=None, collate_fn=_keep_batch, generator=generator, **kept))
        source = NumberedBatches if hasattr(loader.dataset, "__getitems__") else NumberedSamples
        dataset, sampler = source(loader.dataset, self._seed), _Numbers(self._order, self._at, share)
        kept |= {"collate_fn": loader.collate_fn, "generator": generator}
        if loader.batch_sampler is None:
            return iter(DataLoader(dataset, batch_size=None, sampler=_Singles(sampler), **kept))
        return iter(DataLoader(dataset, batch_sampler=sampler, **kept))

    def _stream(self, share: SampleShare) -> SharedStream:
        loader, dataset = self._loader, _whole_stream(self._loader.dataset)
        if self._at.index and not can_seek(dataset) and share.rank == 0:
            write_stderr(
                f"orch: {type(dataset).__name__} cannot seek: it reads the first {self._at.index} samples again and "
                "drops them (a `skip(count)` that returns the rest avoids that)"
            )
        return SharedStream(dataset, self._at, share, loader.batch_size, self._seed, loader.collate_fn)


class _Numbers(Sampler[list[Any]]):
    """Numbers and items of this rank's batches."""

    def __init__(self, order: SampleOrder, at: Position, share: SampleShare) -> None:
        self._order, self._at, self._share = order, at, share

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._order.batches(self._at, self._share):
            if self._order.yields_batches:
                ((number, indices),) = batch
                yield [(number, index) for index in indices]
            else:
                yield batch


class _Singles(Sampler[Any]):
    """Numbers and items of this rank's samples, for a loader that makes no batches."""

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        for batch in self._numbers:
            yield from batch


def _nothing() -> None:
    """Do nothing."""


def _end_workers(iterator: Any) -> None:
    """End the workers of an iterator. Python would wait for them at its exit."""
    if callable(shut_down := getattr(iterator, "_shutdown_workers", None)):
        shut_down()


def _keep_batch(batch: Any) -> Any:
    """Return the batch, which the stream has collated."""
    return batch


def _whole_stream(dataset: Any) -> Any:
    """Return a stream of Hugging Face's `datasets` without the split that `split_dataset_by_node` has made."""
    if getattr(dataset, "_distributed", None) is None:
        return dataset
    whole = copy.copy(dataset)
    whole._distributed = None
    return whole


def wrap_loader(
    loader: Iterable[Any], *, seed: int, shuffle: bool | None, data_parallel: tuple[int, int] | None
) -> Batches:
    """Return a loader's batches with a position. Raises WorkloadError for an object that is no DataLoader."""
    if not isinstance(loader, DataLoader):
        raise WorkloadError(
            f"orch.batches: {type(loader).__name__} is not a torch DataLoader: wrap the dataset, as in "
            "orch.batches(DataLoader(dataset, batch_size=8))"
        )
    return Batches(loader, seed, shuffle, data_parallel)
