"""Gradient reduction over micro-batches, and refused models."""

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from trainer.parallel.apply import data_parallel, mesh
from trainer.parallel.apply.data_parallel import GradientSync, apply_data_parallel, fsdp_options
from trainer.parallel.apply.fsdp_units import (
    CannotShard,
    ReplacedParameters,
    refuse_recomputed_twice,
    refuse_stale_parameters,
)
from trainer.parallel.apply.gradient_buckets import CannotAverage, mark_replica
from trainer.parallel.data import Reduce
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build

pytestmark = pytest.mark.usefixtures("world")
CPU = torch.device("cpu")


def config(**parallel: Any) -> JobConfig:
    made = build(JobConfig, {"parallel": parallel, "train": {"dtype": "float32"}})
    assert isinstance(made, JobConfig)
    return made


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))


def sharded(**parallel: Any) -> tuple[nn.Sequential, mesh.Layout]:
    made, job = model(), config(**parallel)
    layout = mesh.build(job.parallel, CPU, 0, 1)
    apply_data_parallel(list(made), made, layout, job, MixedPrecisionPolicy())
    return made, layout


def test_fsdp_reduces_after_the_last_micro_batch_or_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("refuse_recomputed_twice", "refuse_stale_parameters"):
        monkeypatch.setattr(data_parallel, name, lambda *_, name=name: asked.append(name))
    for reduce, expected in ((Reduce.LAST, [False, True]), (Reduce.EACH, [])):
        made, layout = sharded()
        told: list[bool] = []
        monkeypatch.setattr(made, "set_requires_gradient_sync", told.append)
        sync = GradientSync(made, layout, reduce)
        for last in (False, False, True):
            sync.begin_step()
            sync.backward(made(torch.ones(1, 2)).sum(), is_last=last)
        assert told == expected
        gradients = sync.end_step()
        assert len(gradients) == 6
        facts = sync.facts()
        assert (facts.used, facts.alike, list(facts.compared), facts.stages) == (0, False, [], 1)
    assert asked == ["refuse_recomputed_twice", "refuse_stale_parameters"] * 2, "in the first pass alone"


def test_units_are_wrapped_and_their_options_are_those_of_the_configuration() -> None:
    made, layout = sharded()
    assert all(isinstance(one, FSDPModule) for one in (*made, made))
    options = fsdp_options(layout, config(fsdp={"offload": "all"}), MixedPrecisionPolicy())
    assert type(options["offload_policy"]).__name__ == "CPUOffloadPolicy"
    assert not options["offload_policy"].pin_memory
    plain = fsdp_options(layout, config(), MixedPrecisionPolicy())
    assert type(plain["offload_policy"]).__name__ == "OffloadPolicy"
    assert not data_parallel.offloads_optimizer(config())
    assert data_parallel.offloads_optimizer(config(fsdp={"offload": "optimizer"}))
    assert not data_parallel.offloads_all(config(fsdp={"offload": "optimizer"}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_ranks_cannot_share_is_refused_before_it_is_wrapped(strategy: str) -> None:
    made, job = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), config(strategy=strategy)
    with pytest.raises(CannotShard, match=r"^0.max_norm=1.0: the forward pass would change weights"):
        apply_data_parallel(list(made), made, mesh.build(job.parallel, CPU, 0, 1), job, MixedPrecisionPolicy())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_units_are_gathered_ahead_in_both_directions(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    ahead: dict[str, list[list[nn.Module]]] = {"forward": [], "backward": []}
    for way in ahead:
        name = f"set_modules_to_{way}_prefetch"
        monkeypatch.setattr(FSDPModule, name, lambda self, found, way=way: ahead[way].append([self, *found]))
    made, _ = sharded(fsdp={"prefetch": depth})
    a, b, c = made
    assert ahead["forward"] == {0: [], 1: [[a, b], [b, c], [c]], 2: [[a, b, c], [b, c], [c]]}[depth]
    assert ahead["backward"] == {0: [], 1: [[a], [b, a], [c, b]], 2: [[a], [b, a], [c, b, a]]}[depth]


def test_one_rank_has_nobody_to_average_with() -> None:
    made = model()
    mark_replica(made)
    layout = mesh.build(config(strategy="ddp").parallel, CPU, 0, 1)
    sync = GradientSync(made, layout, Reduce.LAST)
    sync.backward(made(torch.ones(1, 2)).sum(), is_last=True)
    sync.reduce_now()
    assert all(parameter.grad is not None for parameter in made.parameters())


class Buckets:
    def __init__(self, parameters: Any, group: Any, on_wait: Any, *, uses_hooks: bool) -> None:
        self.parameters, self.uses_hooks, self.asked = list(parameters.values()), uses_hooks, []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)


def replicas(monkeypatch: pytest.MonkeyPatch, *, ranks: int = 2, pp: int = 1, tp: int = 1) -> tuple[Any, Any]:
    made = model()
    mark_replica(made)
    monkeypatch.setattr(data_parallel, "GradientBuckets", Buckets)
    monkeypatch.setattr(data_parallel, "require_equal", lambda replicated, group: None)
    group = SimpleNamespace(size=lambda: ranks)
    layout = SimpleNamespace(
        world_size=ranks * pp * tp, sizes={"pp": pp, "tp": tp},
        mesh={"dp_replicate": SimpleNamespace(get_group=lambda: group)},
    )  # fmt: skip
    return made, layout


def test_replicas_are_averaged_once_a_step_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for reduce in Reduce:
        made, layout = replicas(monkeypatch)
        sync = GradientSync(made, layout, reduce)
        buckets: Any = sync._buckets
        sync.begin_step()
        for last in (False, True):
            sync.backward(made(torch.ones(1, 2)).sum(), is_last=last)
        sync.end_step()
        sync.reduce_now()
        assert buckets.asked == ["begin_step", "begin", "finish", "end_step", "begin", "finish"]
        assert buckets.uses_hooks


@pytest.mark.parametrize(
    ("sizes", "alike"), [({}, True), ({"pp": 2}, False), ({"tp": 2}, False), ({"ranks": 1}, False)]
)
def test_replicas_know_their_norm_where_each_has_all_gradients(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], alike: bool
) -> None:
    made, layout = replicas(monkeypatch, **sizes)
    sync = GradientSync(made, layout, Reduce.LAST)
    made(torch.ones(1, 2)).sum().backward()
    made[0].weight.grad = None
    assert len(sync.end_step()) == 5
    facts = sync.facts()
    assert (facts.alike, facts.stages) == (alike, sizes.get("pp", 1))
    assert bool(facts.used) == (sizes.get("pp", 1) == 1 and sizes.get("ranks", 2) > 1)
    assert facts.compared == []
    if sync._buckets is not None:
        assert sync._buckets.uses_hooks == (sizes.get("pp", 1) == 1)  # type: ignore[attr-defined]


def test_plain_gradients_that_somebody_else_averages_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    layout: Any = SimpleNamespace(world_size=2, sizes={"pp": 1, "tp": 1}, mesh={})
    sync = GradientSync(made, layout, Reduce.LAST)
    made(torch.ones(1, 2)).sum().backward()
    gradients = sync.end_step()
    facts = sync.facts()
    assert (facts.alike, list(map(id, facts.compared))) == (False, list(map(id, gradients)))
    assert sync.facts().compared == [], "held no longer than the parameters hold them"
    assert sync.why_different().startswith("gradients of 0.weight, 0.bias, 1.weight differ between ranks")
    other, its_layout = replicas(monkeypatch)
    told = GradientSync(other, its_layout, Reduce.LAST).why_different()
    assert told.startswith("ranks' gradients differ after parallel.strategy=ddp averaged them")


def test_a_parameter_outside_of_the_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, layout = replicas(monkeypatch)
    outer = nn.ModuleDict({"inner": inner, "late": nn.Linear(1, 1)})
    with pytest.raises(CannotAverage, match=r"^late.weight was created after `parallelize`"):
        GradientSync(outer, layout, Reduce.LAST)
    outer["late"].requires_grad_(False)
    GradientSync(outer, layout, Reduce.LAST)


def test_a_layer_that_is_recomputed_twice_is_refused() -> None:
    made = model()
    x = torch.ones(1, 3, requires_grad=True)
    square = nn.Linear(3, 3)
    made.append(square)
    again = partial(checkpoint, square, use_reentrant=True)
    refuse_recomputed_twice(made, again(x).sum())
    bound = partial(checkpoint, partial(square.forward), use_reentrant=True)
    for twice in (again(again(x)), bound(again(x))):
        with pytest.raises(
            CannotAverage, match=r"^3 is used twice in a forward pass and recomputed with use_reentrant"
        ):
            refuse_recomputed_twice(made, twice.sum())
    other = nn.Linear(3, 3)
    with pytest.raises(CannotAverage, match=r"^Linear is used twice"):
        refuse_recomputed_twice(
            made, checkpoint(other, checkpoint(other, x, use_reentrant=True), use_reentrant=True).sum()
        )
    refuse_recomputed_twice(made, checkpoint(other, again(x), use_reentrant=True).sum())
    refuse_recomputed_twice(
        made, checkpoint(square, checkpoint(square, x, use_reentrant=False), use_reentrant=False).sum()
    )


def test_what_hung_on_a_parameter_is_taken_over_and_who_still_uses_it_is_named() -> None:
    made = model()
    before = ReplacedParameters(made)
    old = made[0].weight
    old.mark, old.own = 1, 2  # type: ignore[attr-defined]
    made[0].weight = nn.Parameter(torch.zeros(3, 2))
    made[0].weight.own = 3  # type: ignore[attr-defined]
    before.copy_attributes(made)
    assert (made[0].weight.mark, made[0].weight.own) == (1, 3)
    assert not hasattr(made[1].weight, "mark")
    made(torch.ones(1, 2)).sum().backward()
    refuse_stale_parameters(made)
    (old.sum() * 2).backward()
    for outer in (made, nn.ModuleDict({"inner": made})):
        with pytest.raises(CannotAverage, match=r"^the loss uses 0.weight from before `parallelize`") as caught:
            refuse_stale_parameters(outer)
    del before, old, caught
    gc.collect()
    refuse_stale_parameters(made)
