"""Reduction of a workload's numbers over ranks."""

import json
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from trainer.worker.train_loop.reduction import MetricReducer
from trainer.worker.workload import Mean, Metric, Rank0, Sum, WorkloadError

pytestmark = pytest.mark.usefixtures("world")


def reducer(rank: int = 0, ranks_per_share: int = 1) -> MetricReducer:
    layout: Any = SimpleNamespace(rank=rank, ranks_per_share=ranks_per_share, device=torch.device("cpu"))
    return MetricReducer("metrics", layout)


def summed(*rows: dict[str, Metric], ranks_per_share: int = 1) -> dict[str, float]:
    ranks = [reducer(rank, ranks_per_share) for rank in range(len(rows))]
    packed = [one.pack(row) for one, row in zip(ranks, rows, strict=True)]
    return ranks[0].unpack(torch.stack(packed).sum(dim=0).tolist())


def test_a_sum_of_ranks_that_read_the_same_data_counts_it_once() -> None:
    assert summed({"seen": Sum(6)}, {"seen": Sum(6)}, ranks_per_share=2) == {"seen": 6.0}
    assert summed({"seen": Sum(6)}, {"seen": Sum(5)}) == {"seen": 11.0}
    assert summed({"seen": Sum(0)}) == {"seen": 0.0}


def test_a_mean_is_weighted_and_that_of_no_samples_counts_nothing() -> None:
    assert summed({"loss": Mean(2.0, 3.0)}, {"loss": Mean(4.0, 1.0)}) == {"loss": 2.5}
    assert summed({"loss": 2.0}, {"loss": torch.tensor([5])}) == {"loss": 3.5}
    assert summed({"loss": 2.0}, {"loss": Mean(float("nan"), 0.0)}) == {"loss": 2.0}
    assert summed({"loss": Mean(float("nan"), 0)}) == {}
    assert summed({"loss": Fraction(2)}, {"loss": Mean(Fraction(4), 1.0)}) == {"loss": 3.0}  # type: ignore[dict-item, arg-type]


def test_of_rank_0_and_of_no_value() -> None:
    assert summed({"lr": Rank0(0.5), "rare": None}, {"lr": Rank0(7.0), "rare": 3}) == {"lr": 0.5, "rare": 3.0}
    assert summed({"rare": None}, {"rare": None}) == {}


def test_a_row_has_the_sum_its_weight_and_the_ranks_of_a_plain_sum() -> None:
    values = {"mean": Mean(2.0, 3.0), "first": Rank0(5.0), "seen": Sum(6), "rare": None}
    assert reducer().pack(values).reshape(4, 3).tolist() == [[6, 3, 0], [5, 1, 0], [6, 0, 1], [0, 0, 0]]


def test_a_tensor_with_a_gradient_and_a_sharded_one_are_numbers() -> None:
    mesh = init_device_mesh("cpu", (1,))
    spread = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()])
    assert summed({"loss": torch.tensor(1.5, requires_grad=True), "norm": spread}) == {"loss": 1.5, "norm": 2.0}


def test_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reducer()
    assert made.names == ()
    assert made.reduce({"loss": 2.0, "seen": Sum(3)}) == {"loss": 2.0, "seen": 3.0}
    assert made.names == ("loss", "seen")
    assert made.reduce({"seen": Sum(1)}) == {"seen": 1.0}
    assert reducer().reduce({}) == {}

    def two_ranks(row: torch.Tensor) -> None:
        row *= 2

    monkeypatch.setattr(dist, "all_reduce", two_ranks)
    assert made.reduce({"seen": Sum(1)}) == {"seen": 2.0}


@pytest.mark.parametrize("other", ["m", "a name that is longer than that of this rank"])
def test_names_of_all_ranks_are_known_though_they_differ_in_length(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    theirs = torch.tensor(list(json.dumps([other]).encode()), dtype=torch.uint8)

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        sent = torch.tensor([len(theirs)]) if mine.dtype == torch.int64 else theirs
        parts[0].copy_(mine)
        parts[1][: len(sent)] = sent

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    made = reducer()
    assert made.pack({"loss": 2.0}).tolist() == [2.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert made.names == ("loss", other)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1.0], r"^metrics\(\) must return a dict of numbers by name$"),
        ({1: 1.0}, r"^metrics\(\) must return a dict of numbers by name$"),
        ({"loss": "high"}, r"^metrics\(\) returns loss, which is neither a number nor a tensor with one element$"),
        ({"loss": torch.ones(2)}, r"^metrics\(\) returns loss, which is neither"),
        ({"loss": Mean(1.0, torch.ones(2))}, r"^metrics\(\) returns loss, which is neither"),
    ],
)
def test_what_is_no_number_is_refused(values: Any, why: str) -> None:
    with pytest.raises(WorkloadError, match=why):
        reducer().pack(values)


def test_a_name_that_comes_later_is_refused() -> None:
    made = reducer()
    made.pack({"loss": 1.0})
    with pytest.raises(WorkloadError, match=r"returns late, which it did not return the first time: return all names"):
        made.pack({"loss": 1.0, "late": 2.0})
