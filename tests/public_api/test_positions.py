"""`orch.batches` on real ranks: no sample twice, none skipped, also on another number of ranks."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, WeightedRandomSampler

import orch
from tests.public_api.reading_ranks import BATCH, SAMPLES, Numbers, Stream, read_batches
from tests.warm_programs import WarmPrograms
from trainer.worker.workload import WorkloadError

WORLDS = [4, 3, 4, 4, 3, 4]
EACH = 5
"""Batches of each rank between two kills."""
NEEDS = {"stateful": "torchdata", "hf": "datasets", "hf-stream": "datasets"}


def reports(programs: WarmPrograms, folder: Path, case: dict[str, Any], world: int) -> list[Any]:
    """Return what each rank of a world has read before it was killed.

    Packages that are not installed for the tests are found only by this process, which then reads for every rank.
    """
    if case["kind"] in NEEDS:
        return [read_batches({**case, "rank": rank}) for rank in range(world)]
    files = [folder / f"{case['number']}-{rank}.json" for rank in range(world)]
    rows = [[json.dumps({**case, "rank": rank, "file": str(file)})] for rank, file in enumerate(files)]
    ended = programs.run("tests.public_api.reading_ranks", rows)
    assert [one.code for one in ended] == [-9] * world, ended[0].err
    return [json.loads(file.read_text()) for file in files]


def read(programs: WarmPrograms, folder: Path, kind: str, worlds: list[int], each: int) -> list[Any]:
    """Return the samples in the order that all ranks share, read by ranks that are killed between two worlds."""
    found, state = [], None
    for number, world in enumerate(worlds):
        case = {"kind": kind, "number": number, "world": world, "state": state, "batches": each, "lost": number % 3}
        ranks = reports(programs, folder, case, world)
        state = ranks[0]["state"]
        assert [one["state"] for one in ranks] == [state] * world
        for batch in range(each):
            rows = [one["rows"][batch] for one in ranks]
            found += [row[place] for place in range(BATCH) for row in rows]
    return found


@pytest.mark.multi
@pytest.mark.filterwarnings("default::Warning")  # of packages that are not installed for the tests
@pytest.mark.parametrize(
    "kind",
    ["map", pytest.param("stream", marks=pytest.mark.proof), "stateful", "hf", "hf-stream"],
)  # fmt: skip
def test_five_restarts_on_4_3_and_4_ranks_read_what_an_undisturbed_run_reads(
    programs: WarmPrograms, tmp_path: Path, kind: str
) -> None:
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    disturbed = read(programs, tmp_path, kind, WORLDS, EACH)
    total = sum(WORLDS) * EACH * BATCH
    calm = read(programs, tmp_path, kind, [4], -(-total // (4 * BATCH)))
    assert disturbed == calm[:total]
    ids = [index for index, _ in disturbed]
    for epoch in range(total // SAMPLES):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert ids[:SAMPLES] != ids[SAMPLES : 2 * SAMPLES]


def test_epochs_of_a_loop_continue_where_the_last_one_ended() -> None:
    data = orch.batches(DataLoader(Numbers(), batch_size=10))
    epochs = [[int(index) for batch in data for index in batch["id"]] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [110, 100]
    assert [index for epoch in epochs for index in epoch] == [index % SAMPLES for index in range(210)]
    assert data.epoch == 2


class Seeking(Stream):
    """A stream whose rest begins anew at epoch 0, like those of `datasets`."""

    first = 0

    def skip(self, count: int) -> Stream:
        rest = Seeking()
        rest.first = count
        return rest

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.first, None)


def test_a_stream_that_can_seek_continues_in_its_epoch() -> None:
    def read(batches: int, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        data = orch.batches(DataLoader(Seeking(), batch_size=4))
        data.load_state_dict(state or data.state_dict())
        return [next(data)["id"].tolist() for _ in range(batches)], data.state_dict()

    whole, _ = read(60)
    for first in (10, 40):
        rest, _ = read(60 - first, read(first)[1])
        assert rest == whole[first:]


def test_a_custom_sampler_keeps_its_order_and_repeats_it() -> None:
    loader = DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, 40))
    data, again = orch.batches(loader, seed=1), orch.batches(loader, seed=1)
    first = [next(data)["id"].tolist() for _ in range(15)]
    for _ in range(3):
        next(again)
    again.load_state_dict(again.state_dict())
    assert [next(again)["id"].tolist() for _ in range(12)] == first[3:]
    assert first[:10] != first[10:20]


def test_what_cannot_be_exact_is_refused() -> None:
    class ByNode(WeightedRandomSampler):
        num_replicas = 2

    with pytest.raises(WorkloadError, match="ByNode splits the samples between ranks"):
        orch.batches(DataLoader(Numbers(), sampler=ByNode([1.0], 1)))
    with pytest.raises(WorkloadError, match="list is not a torch DataLoader"):
        orch.batches([1, 2])
    data = orch.batches(DataLoader(Numbers(), batch_size=4))
    with pytest.raises(WorkloadError, match="number of samples was 7 .* and is 101 now"):
        data.load_state_dict({**data.state_dict(), "samples": 7})
