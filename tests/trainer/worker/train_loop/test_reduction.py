"""Sums of a step over all ranks."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.parallel.apply.gradient_buckets import GradientFacts
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.train_loop import reduction
from trainer.worker.train_loop.reduction import (
    OwnNumbers,
    RankZeroMessage,
    Reduced,
    StepResult,
    clip,
    copies,
    scalar_loss,
    squared_norm,
    unscale,
)
from trainer.worker.train_loop.save_schedule import SaveVote
from trainer.worker.workload import WorkloadError

pytestmark = pytest.mark.usefixtures("world")
ZERO = RankZeroMessage(save_vote=SaveVote.SAVE, committed=12)


class Ranks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.others: list[torch.Tensor] = []
        self.steps: list[int] = []
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        monkeypatch.setattr(reduction, "StepSums", self._row)

    def _row(self, own: torch.Tensor, step: int) -> Any:
        self.steps.append(step)
        rows = [*self.others, own]
        self.others.append(own)
        return SimpleNamespace(wait=lambda: torch.stack(rows).sum(dim=0))


def test_what_all_ranks_read_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor(12.0)]
    own = OwnNumbers(torch.tensor([1.0, 2.0]).double(), torch.tensor([5.0, 6.0, 7.0]).double())
    first = reduction.reduce(7, gradients, torch.tensor(2.0), StopReason.NONE, ZERO, own, GradientFacts(used=9))
    second = reduction.reduce(
        7, gradients, torch.tensor(4.0), StopReason.PREEMPTION, RankZeroMessage(), own, GradientFacts(used=9)
    )
    assert ranks.steps == [7, 7]
    assert second.result() == StepResult(
        step=7, loss=3.0, grad_norm=13.0, stop=StopReason.PREEMPTION, message=ZERO, own=[2.0, 4.0],
        loads=[10.0, 12.0, 14.0],
    )  # fmt: skip
    assert float(second.norm) == 13.0
    assert second.loads is not None
    assert second.loads.tolist() == [10.0, 12.0, 14.0]
    assert first.result().loss == 1.0, "half of a mean of two"


def test_the_sums_are_copied_once_and_the_host_does_not_wait_for_the_copy() -> None:
    sums, row = MagicMock(is_cuda=False), MagicMock()
    row.wait.return_value = sums
    reduced = Reduced(1, row)
    reduced.wait()
    reduced.wait()
    row.wait.assert_called_once_with()
    sums.to.assert_called_once_with("cpu", non_blocking=True)


def test_without_numbers_of_its_own_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(monkeypatch, 1)
    none = reduction.reduce(8, [], torch.tensor(1.5), StopReason.NONE, RankZeroMessage())
    found = none.result()
    assert none.loads is None
    assert (found.loss, found.grad_norm, found.own, found.loads, found.stop) == (1.5, 0.0, [], [], StopReason.NONE)


@pytest.mark.parametrize(("other", "alike"), [(9, True), (10, False), (0, False)])
def test_ranks_that_use_other_parameters_are_noticed(monkeypatch: pytest.MonkeyPatch, other: int, alike: bool) -> None:
    Ranks(monkeypatch, 2)
    for used in (9, other):
        last = reduction.reduce(
            1, [], torch.tensor(1.0), StopReason.NONE, RankZeroMessage(), about=GradientFacts(used=used)
        )
    assert last.result().used_alike == alike


@pytest.mark.parametrize("whole", [True, False], ids=["all of them", "some of them"])
@pytest.mark.parametrize(("other", "alike"), [(2.0, True), (2.0 + 2**-20, False), (math.nan, True)])
def test_ranks_with_other_gradients_are_noticed(
    monkeypatch: pytest.MonkeyPatch, other: float, alike: bool, whole: bool
) -> None:
    Ranks(monkeypatch, 2)
    for value in (2.0, other):
        gradients = [torch.tensor([value])]
        about = GradientFacts(alike=True) if whole else GradientFacts(compared=gradients)
        last = reduction.reduce(1, gradients, torch.tensor(1.0), StopReason.NONE, RankZeroMessage(), about=about)
        if whole:
            assert float(last.norm) == pytest.approx(value, nan_ok=True), "known before the sums are"
    assert last.result().gradients_alike == alike


def test_gradients_of_stages_are_those_of_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(monkeypatch, 4)
    for value in (3.0, 3.0, 4.0, 4.0):
        about = GradientFacts(stages=2)
        last = reduction.reduce(
            1, [torch.tensor([value])], torch.tensor(0.0), StopReason.NONE, RankZeroMessage(), about=about
        )
    assert last.result().grad_norm == pytest.approx(5.0)


def test_an_element_counts_by_the_ranks_that_hold_it() -> None:
    assert float(squared_norm([torch.tensor([2.0, 0.0]), torch.tensor(4.0)], 4)) == 5.0
    assert float(squared_norm([], 4)) == 0.0
    assert squared_norm([torch.tensor([1.0])], 1).dtype == torch.float64
    assert copies(torch.ones(1), 6) == 6
    mesh: Any = SimpleNamespace(size=lambda dim: (2, 3)[dim])
    for placements, count in {(Shard(0), Replicate()): 3, (Replicate(), Shard(1)): 2, (Shard(0), Shard(0)): 1}.items():
        tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        tensor._spec = SimpleNamespace(placements=placements, mesh=mesh, device_mesh=mesh)  # type: ignore[assignment]
        assert copies(tensor, 6) == count


def test_gradients_are_clipped_where_they_are_too_long_and_not_otherwise() -> None:
    def clipped(norm: float, limit: float) -> float:
        gradient = torch.tensor([1.0])
        clip([gradient], torch.tensor(norm).double(), limit)
        return float(gradient)

    assert clipped(4.0, 1.0) == pytest.approx(0.25)
    assert [clipped(0.5, 1.0), clipped(4.0, 0.0), clipped(4.0, -1.0)] == [1.0, 1.0, 1.0]
    assert clipped(4.0, 0.5) == pytest.approx(0.125)
    clip([], torch.tensor(4.0), 1.0)


def test_the_scale_of_the_loss_is_taken_out_of_gradients() -> None:
    gradients = [torch.tensor([8.0]), torch.tensor(4.0)]
    unscale(gradients, 1.0)
    assert [float(one) for one in gradients] == [8.0, 4.0]
    unscale(gradients, 4.0)
    assert [float(one) for one in gradients] == [2.0, 1.0]
    unscale([], 4.0)


class Mine:
    pass


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (None, "None"),
        (0.5, "a float"),
        ((1, 2), "a tuple"),
        (torch.ones(2, requires_grad=True), r"a tensor of shape \[2\]"),
        (torch.ones(1, requires_grad=True), r"a tensor of shape \[1\]"),
        (torch.tensor(0.5), "a tensor without a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_the_users_error(loss: Any, found: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^Mine\.loss\(\) returned {found}: it must return the mean loss"):
        scalar_loss(Mine(), loss)


def test_a_scalar_is_taken_as_it_is() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    assert scalar_loss(Mine(), loss) is loss
