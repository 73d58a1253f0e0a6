"""Gradient buckets: contents, order and results, with a fake peer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainer.parallel.apply import data_parallel, gradient_buckets
from trainer.parallel.apply.gradient_buckets import CannotAverage, GradientBuckets, mark_replica, replicated_parameters


class Work:
    def __init__(self, end: Callable[[], None]) -> None:
        self.wait = end


class Pair:
    """A group of two: the peer has three times this rank's gradients, and sums arrive when waited for."""

    def __init__(self, ranks: int = 2) -> None:
        self._ranks = ranks
        self.sent: list[list[float]] = []
        self.waits: list[int] = []

    def size(self) -> int:
        return self._ranks

    def all_reduce(self, flat: torch.Tensor, *, group: Any, async_op: bool) -> Work:
        assert group is self
        assert async_op
        self.sent.append(flat.tolist())
        number = len(self.sent)

        def end() -> None:
            self.waits.append(number)
            flat.mul_(4)

        return Work(end)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    made = Pair()
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    return made


def model() -> nn.ModuleDict:
    made = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    for parameter in made.parameters():
        nn.init.ones_(parameter)
    return made


def loss(of: nn.ModuleDict, scale: float = 1.0, *, skip: str = "") -> torch.Tensor:
    out = of["a"](torch.tensor([1.0, 2.0])) if skip != "a" else torch.ones(1)
    return (of["b"](out) if skip != "b" else out).sum() * scale


def buckets(of: nn.Module, group: Any, waits: list[int] | None = None, *, uses_hooks: bool = True) -> GradientBuckets:
    called = waits if waits is not None else []
    return GradientBuckets(dict(of.named_parameters()), group, lambda: called.append(1), uses_hooks=uses_hooks)


def gradients(of: nn.Module) -> dict[str, list[float] | None]:
    return {
        name.removesuffix(".weight"): None if one.grad is None else one.grad.flatten().tolist()
        for name, one in of.named_parameters()
    }


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "pack_buckets", lambda sizes: [[at] for at, _ in enumerate(list(sizes))])


def test_gradients_are_means_over_the_ranks(pair: Pair) -> None:
    made, waits = model(), list[int]()
    averages = buckets(made, pair, waits)
    averages.begin()
    loss(made).backward()
    averages.finish()
    assert pair.sent == [[1.5, 0.5, 1.0]], "half of its own, in the order in which gradients come"
    assert gradients(made) == {"a": [2.0, 4.0], "b": [6.0]}
    assert waits == [1]
    assert averages.parameters == list(made.parameters())


def test_a_bucket_leaves_when_its_gradients_are_there_and_not_before_the_one_in_front_of_it(
    pair: Pair, apart: None
) -> None:
    made = model()
    averages = buckets(made, pair)
    averages.begin()
    made["a"].weight.register_hook(lambda _: pair.sent.append(["a comes"]))  # type: ignore[arg-type]
    loss(made).backward()
    averages.finish()
    assert pair.sent == [[1.5], ["a comes"], [0.5, 1.0]]
    averages.begin()
    pair.sent.clear()
    loss(made, skip="b").backward()
    assert pair.sent == [["a comes"]], "the first bucket still waits"
    averages.finish()
    assert [len(one) for one in pair.sent[1:]] == [1, 2]


def test_each_sum_is_waited_for_once(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    for _ in range(2):
        averages.begin()
        loss(made).backward()
        averages.finish()
    assert pair.waits == [1, 2]


def test_without_a_beginning_gradients_of_micro_batches_are_added_up(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    loss(made).backward()
    assert pair.sent == []
    averages.begin()
    loss(made).backward()
    averages.finish()
    assert pair.sent == [[3.0, 1.0, 2.0]]
    loss(made).backward()
    assert len(pair.sent) == 1, "after the last one the next step begins"


def test_what_this_rank_has_not_used_is_sent_as_zeros_and_keeps_no_gradient(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    averages.begin()
    loss(made, skip="a").backward()
    averages.finish()
    assert pair.sent == [[0.5, 0.0, 0.0]]
    assert gradients(made) == {"a": None, "b": [2.0]}


def test_frozen_parameters_are_left_out_until_they_are_thawed(pair: Pair, apart: None) -> None:
    made = model()
    made["a"].requires_grad_(False)
    averages = buckets(made, pair)
    assert not made["a"].weight.requires_grad
    averages.begin()
    loss(made).backward()
    averages.finish()
    assert pair.sent == [[1.5]], "all of the other bucket are frozen"
    made["a"].requires_grad_(True)
    averages.begin()
    loss(made).backward()
    averages.finish()
    assert len(pair.sent) == 3


def test_one_that_was_frozen_after_its_gradient_came_is_sent(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    loss(made).backward()
    made["a"].requires_grad_(False)
    averages.begin()
    averages.finish()
    assert pair.sent == [[1.5, 0.5, 1.0]]


def test_a_pipeline_averages_all_at_the_end(pair: Pair, apart: None) -> None:
    made = model()
    made["b"].weight.register_post_accumulate_grad_hook(lambda _: None)  # irrelevant without hooks
    averages = buckets(made, pair, uses_hooks=False)
    for _ in range(2):
        loss(made).backward()
    assert pair.sent == []
    averages.begin()
    averages.finish()
    assert pair.sent == [[3.0], [1.0, 2.0]]


def test_gradients_lie_as_their_parameters_do(pair: Pair) -> None:
    made = nn.Module()
    made.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    made.gaps = nn.Parameter(torch.arange(8.0).view(4, 2)[:, 0])
    averages = buckets(made, pair)
    averages.begin()
    (made.turned * torch.arange(6.0).view(3, 2)).sum().backward()
    averages.finish()
    assert made.turned.grad is not None
    assert made.turned.grad.stride() == made.turned.stride() == (1, 3)
    assert made.turned.grad.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert made.gaps.grad is None


def test_integers_are_no_weights(pair: Pair) -> None:
    made = nn.Module()
    made.table = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    made.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    assert [one.dtype for one in buckets(made, pair).parameters] == [torch.complex64]


def test_alone_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Pair(ranks=1)
    monkeypatch.setattr(dist, "all_reduce", alone.all_reduce)
    made = model()
    averages = buckets(made, alone)
    averages.begin()
    loss(made).backward()
    averages.finish()
    assert alone.sent == []
    assert gradients(made) == {"a": [1.0, 2.0], "b": [3.0]}


def test_a_gradient_outside_the_backward_pass_is_refused(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    averages.end_step()
    with pytest.raises(CannotAverage, match=r"^b.weight got a gradient outside the backward pass"):
        loss(made).backward()
    averages.begin_step()
    loss(made).backward()


def test_two_gradients_in_one_pass_are_refused(pair: Pair) -> None:
    made = model()
    averages = buckets(made, pair)
    averages.begin()
    loss(made).backward()
    with pytest.raises(CannotAverage, match=r"^b.weight got two gradients in one backward pass: recompute"):
        loss(made).backward()
    averages.finish()


def test_a_hook_that_would_see_gradients_too_early_is_refused(pair: Pair) -> None:
    made = model()
    made["a"].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CannotAverage, match=r"^a.weight has a hook set by the workload"):
        buckets(made, pair)
    late = model()
    averages = buckets(late, pair)
    averages.begin()
    late["b"].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CannotAverage, match=r"^b.weight has a hook set by the workload"):
        averages.begin()


def test_replicas_are_the_parameters_of_what_is_marked() -> None:
    made = nn.ModuleDict({"marked": model(), "other": nn.Linear(1, 1)})
    assert replicated_parameters(made) == {}
    mark_replica(made["marked"])
    assert list(replicated_parameters(made)) == ["marked.a.weight", "marked.b.weight"]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_still_sums_over_tensor_parallel_ranks_are_taken(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    group, mesh = Pair(ranks), init_device_mesh("cpu", (1,))
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    made = nn.Module()
    made.norm = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    averages = buckets(made, group, uses_hooks=False)
    made.norm.grad = DTensor.from_local(torch.full((2,), 3.0), mesh, [Partial()])
    averages.begin()
    averages.finish()
    found = made.norm.grad
    assert isinstance(found, DTensor)
    assert found.placements == (Replicate(),)
    assert found.to_local().tolist() == ([3.0, 3.0] if ranks == 1 else [6.0, 6.0])
    assert group.sent == ([] if ranks == 1 else [[1.5, 1.5]])


@pytest.mark.parametrize(("numbers", "called"), [(1 << 15, "all_gather"), ((1 << 15) + 1, "all_reduce")])
def test_short_rows_are_gathered_and_long_ones_reduced(
    monkeypatch: pytest.MonkeyPatch, numbers: int, called: str
) -> None:
    calls: list[str] = []

    def all_gather(rows: list[torch.Tensor], own: torch.Tensor, *, async_op: bool) -> Work:
        calls.append("all_gather")
        assert async_op
        for row in rows:
            row.copy_(own)
        return Work(lambda: None)

    def all_reduce(own: torch.Tensor, *, async_op: bool) -> Work:
        calls.append("all_reduce")
        assert async_op
        return Work(lambda: own.mul_(2))  # type: ignore[arg-type,return-value]

    world = SimpleNamespace(get_world_size=lambda: 2, all_gather=all_gather, all_reduce=all_reduce)
    monkeypatch.setattr(gradient_buckets, "dist", world)
    sums = gradient_buckets.StepSums(torch.ones(numbers, dtype=torch.float64), step=3).wait()
    assert calls == [called]
    assert torch.equal(sums, torch.full((numbers,), 2.0, dtype=torch.float64))


@pytest.mark.usefixtures("world")
def test_units_that_no_forward_pass_has_used_are_gathered_once_and_freed_again() -> None:
    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), init_device_mesh("cpu", (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    model(torch.ones(1, 2))
    more = nn.Linear(2, 2)
    fully_shard(more, mesh=mesh)
    model.append(more)
    gathered: list[nn.Module] = []
    for unit in model:
        unit.unshard = lambda unit=unit, real=unit.unshard: (gathered.append(unit), real())
    data_parallel._gather_unused_units(model)
    assert gathered == [more]
    assert isinstance(more.weight, DTensor), "it is sharded again"
