"""Schedulers of torch and of users continue with the same rates in a fresh process."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch

from trainer.worker.saved_state.object_state import ObjectState
from trainer.worker.saved_state.scheduler_state import SchedulerState
from trainer.worker.workload import BaseWorkload, WorkloadError, build_scheduler

MADE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: of_torch.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: of_torch.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: of_torch.StepLR(o, 3),
    "MultiStepLR": lambda o: of_torch.MultiStepLR(o, [4, 8]),
    "ConstantLR": lambda o: of_torch.ConstantLR(o, total_iters=8),
    "LinearLR": lambda o: of_torch.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: of_torch.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: of_torch.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: of_torch.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: of_torch.SequentialLR(o, [of_torch.ConstantLR(o), of_torch.ExponentialLR(o, 0.9)], [6]),
    "ChainedScheduler": lambda o: of_torch.ChainedScheduler([of_torch.ConstantLR(o), of_torch.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=1),
}


class Setting:
    def __init__(self, kind: str, *, tensor_rate: bool = False) -> None:
        model = nn.Linear(2, 1)
        rate: Any = torch.tensor(0.1) if tensor_rate else 0.1
        groups = [{"params": [model.weight], "lr": rate}, {"params": [model.bias], "lr": 0.05}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = MADE[kind](self.optimizer)
        self.wrapped = SchedulerState(self.scheduler, self.optimizer)
        self.state = ObjectState(self.wrapped, "scheduler", model, torch.device("cpu"), called=kind)

    def step(self, number: int) -> list[float]:
        self.optimizer.step()
        if isinstance(self.scheduler, of_torch.ReduceLROnPlateau):
            self.scheduler.step(float(number % 3))
        else:
            self.scheduler.step()
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def restored(kind: str, before: Setting) -> Setting:
    return into(Setting(kind), before)


def into(again: Setting, before: Setting) -> Setting:
    facts, tensors = json.loads(json.dumps(before.state.facts())), before.state.tensors()
    for key, target in again.state.targets(facts).items():
        target.copy_(tensors[key])
    again.state.restore(facts)
    return again


@pytest.mark.parametrize("kind", MADE)
def test_every_schedule_of_torch_goes_on_with_the_same_rates(kind: str) -> None:
    whole = Setting(kind)
    rates = [whole.step(number) for number in range(15)]
    first = Setting(kind)
    assert [first.step(number) for number in range(7)] == rates[:7]
    again = restored(kind, first)
    assert again.wrapped.overruled == []
    assert [again.step(number) for number in range(7, 15)] == rates[7:]
    assert rates[0] != rates[-1], "the example shows nothing"


def test_settings_that_the_checkpoint_overrules_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Setting("OneCycleLR")
    first.step(0)
    monkeypatch.setitem(MADE, "OneCycleLR", lambda o: of_torch.OneCycleLR(o, 0.1, total_steps=30))
    (words,) = restored("OneCycleLR", first).wrapped.overruled
    assert words == "the checkpoint's schedule continues: total_steps 20 (now 30)"
    again = restored("OneCycleLR", restored("OneCycleLR", first))
    assert again.wrapped.overruled == [words]
    for number in range(1, 20):
        again.step(number)
    with pytest.raises(ValueError, match="Tried to step 21 times"):  # which is what the words are about
        again.step(20)


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        (
            "SequentialLR",
            lambda o: of_torch.SequentialLR(o, [of_torch.ConstantLR(o), of_torch.ExponentialLR(o, 0.8)], [7]),
            "milestones [6] (now [7]), 1.gamma 0.9 (now 0.8)",
        ),
        (
            "ChainedScheduler",
            lambda o: of_torch.ChainedScheduler([of_torch.ConstantLR(o, 0.5), of_torch.ExponentialLR(o, 0.9)]),
            f"0.factor {1 / 3} (now 0.5)",
        ),
        ("MultiStepLR", lambda o: of_torch.MultiStepLR(o, [4, 9]), "milestones [4, 8] (now [4, 9])"),
    ],
)
def test_settings_inside_a_schedule_are_told_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, other: Callable[[Any], Any], words: str
) -> None:
    first = Setting(kind)
    first.step(0)
    monkeypatch.setitem(MADE, kind, other)
    assert restored(kind, first).wrapped.overruled == [f"the checkpoint's schedule continues: {words}"]


def test_a_rate_that_the_checkpoint_overrules_is_told() -> None:
    first, again = Setting("MultiStepLR"), Setting("MultiStepLR")
    first.step(0)
    for group in again.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.5
    again.scheduler = of_torch.MultiStepLR(again.optimizer, [4, 8])
    again.wrapped = SchedulerState(again.scheduler, again.optimizer)
    again.state = ObjectState(again.wrapped, "scheduler", nn.Linear(2, 1), torch.device("cpu"))
    into(again, first)
    assert again.wrapped.overruled == ["the checkpoint's schedule continues: base_lrs [0.1, 0.05] (now [0.5, 0.5])"]


def test_none_is_left_out() -> None:
    there = {name for name in vars(of_torch) if name.endswith(("LR", "Restarts", "Plateau")) and name[0] != "_"}
    assert there - {"LRScheduler", "SWALR"} <= set(MADE)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    first = Setting("ExponentialLR", tensor_rate=True)
    for number in range(3):
        first.step(number)
    again = Setting("ExponentialLR", tensor_rate=True)
    rate = again.optimizer.param_groups[0]["lr"]
    facts = first.state.facts()
    for key, target in again.state.targets(facts).items():
        target.copy_(first.state.tensors()[key])
    again.state.restore(facts)
    assert again.optimizer.param_groups[0]["lr"] is rate
    assert again.step(3) == first.step(3)


def test_other_groups_are_refused() -> None:
    first, again = Setting("StepLR"), Setting("StepLR")
    again.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1})
    facts = first.state.facts()
    again.state.targets(facts)
    with pytest.raises(WorkloadError, match="learning rates for 2 parameter groups, but the optimizer has 3"):
        again.state.restore(facts)


def test_what_is_no_scheduler_is_refused_at_once() -> None:
    class Mine(BaseWorkload):
        def build_scheduler(self, optimizer: Any) -> Any:
            return 0.1

    with pytest.raises(WorkloadError, match=r"float, which build_scheduler\(\) returns, has no step\(\)"):
        build_scheduler(Mine(None), None)  # type: ignore[arg-type]
    assert build_scheduler(BaseWorkload(None), None) is None  # type: ignore[arg-type]


def test_no_schedule_has_no_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert SchedulerState(None, optimizer).state_dict() == {}
