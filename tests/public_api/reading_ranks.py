"""One rank that reads samples through `orch.batches` with two workers, and is killed with SIGKILL in the middle.

`main` reads one JSON object: kind of data, rank, world, `state` to continue from, number of `batches` to report and of
batches `lost` in the kill, and the file for the report.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import orch

SAMPLES, BATCH = 101, 2


class Numbers(Dataset[Any]):
    """Samples with a random part that depends on the generators of a worker."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "noise": torch.rand(())}


class Stream(IterableDataset[Any]):
    """A stream that cannot seek, in another order in each epoch, and that splits itself between workers."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for at in range(first, SAMPLES, step):
            yield {"id": (at * 7 + self.epoch) % SAMPLES, "noise": torch.rand(())}


def build(kind: str, rank: int, world: int) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2}
    if kind == "map":
        return DataLoader(Numbers(), shuffle=True, **options)
    if kind == "stream":
        return DataLoader(Stream(), **options)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Numbers(), shuffle=True, **options)
    import datasets
    import pyarrow
    from datasets.distributed import split_dataset_by_node

    # The fingerprint spares `datasets` from pickling the table, which some of its versions cannot.
    rows = datasets.Dataset(pyarrow.table({"id": list(range(SAMPLES))}), fingerprint="numbers")
    if kind == "hf":
        return DataLoader(rows, shuffle=True, **options)
    rows = rows.to_iterable_dataset(num_shards=4)
    return DataLoader(split_dataset_by_node(rows.shuffle(seed=3, buffer_size=20), rank, world), **options)


def read_batches(case: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of this rank's batches, each with its random part, and the position after them."""
    place = (case["rank"], case["world"])
    data = orch.batches(build(case["kind"], *place), seed=5, data_parallel=place)
    if case["state"] is not None:
        data.load_state_dict(case["state"])
    read = [next(data) for _ in range(case["batches"])]
    state = data.state_dict()
    for _ in range(case["lost"]):
        next(data)
    rows = [
        [[int(index), float(noise)] for index, noise in zip(one["id"], one.get("noise", one["id"]), strict=True)]
        for one in read
    ]
    return {"rows": rows, "state": state}


def main() -> None:
    case = json.loads(sys.argv[1])
    Path(case["file"]).write_text(json.dumps(read_batches(case)))
    os.kill(os.getpid(), signal.SIGKILL)
