"""Ranks compare bits by exchanging two numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.parallel.apply.data_parallel import are_equal, require_equal, residue
from trainer.parallel.apply.gradient_buckets import CannotAverage, usage_mark


def marks(*numbers: float) -> tuple[int, float, float]:
    found = [float(residue(torch.tensor(number, dtype=torch.float64))) for number in numbers]
    return len(found), sum(found), sum(one * one for one in found)


def test_numbers_are_equal_when_all_their_bits_are() -> None:
    assert are_equal(*marks(0.1, 0.1, 0.1))
    assert are_equal(*marks(float("nan"), float("nan")))
    assert not are_equal(*marks(0.1, 0.1, 0.1 + 2**-56))
    _, one, square = marks(1e300)
    _, other, its_square = marks(1.1e300)
    million = 1_000_000
    assert are_equal(million, million * one, million * square), "sums of a million ranks are exact"
    assert not are_equal(million, (million - 1) * one + other, (million - 1) * square + its_square)


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    given: list[torch.Tensor] = []

    def all_reduce(sums: torch.Tensor, *, group: Any) -> None:
        given.append(sums.clone())
        sums.copy_(torch.stack(given).sum(dim=0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return given


def weights(seed: int = 1, *, turned: bool = False) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    one, two = (torch.randn(3, generator=generator) for _ in range(2))
    return {name: nn.Parameter(value) for name, value in zip("ab", (two, one) if turned else (one, two), strict=True)}


def require(own: dict[str, nn.Parameter], ranks: int) -> None:
    require_equal(own, SimpleNamespace(size=lambda: ranks))  # type: ignore[arg-type]


def test_ranks_with_the_same_weights_may_begin(of_ranks: list[torch.Tensor]) -> None:
    none = {
        "empty": nn.Parameter(torch.empty(0)), "table": nn.Parameter(torch.ones(1, dtype=torch.int64), False)
    }  # fmt: skip
    require({**weights(), **none}, 1)
    require({**weights(), "table": nn.Parameter(torch.zeros(1, dtype=torch.int64), False)}, 2)


@pytest.mark.parametrize("other", [weights(2), weights(turned=True)])
def test_ranks_with_other_weights_and_with_the_same_in_another_order_are_refused(
    of_ranks: list[torch.Tensor], other: dict[str, nn.Parameter]
) -> None:
    require(weights(), 1)
    with pytest.raises(CannotAverage, match=r"^ranks start with different weights, and parallel.strategy=ddp"):
        require(other, 2)


def test_complex_weights_count(of_ranks: list[torch.Tensor]) -> None:
    require({"turn": nn.Parameter(torch.full((2,), 1j))}, 1)
    with pytest.raises(CannotAverage):
        require({"turn": nn.Parameter(torch.full((2,), 2j))}, 2)


def test_a_mark_stands_for_what_is_used_and_what_is_frozen() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.requires_grad_(False)
    used.grad = torch.ones(1)
    assert usage_mark([used, used]) == 0
    found = [usage_mark(row) for row in ([used, unused], [unused, used], [used, frozen], [used, used, unused])]
    assert len(set(found)) == 4
    assert all(1 <= mark <= 1 << 16 for mark in found)
    assert usage_mark([used, unused]) == found[0]
