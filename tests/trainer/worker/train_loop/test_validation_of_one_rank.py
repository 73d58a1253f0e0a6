"""Validation of one rank in this process: its schedule, its result and its saves."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.trainer.worker.my_workload import Validated
from tests.trainer.worker.train_loop.one_rank import VALIDATED, OneRank, ask, workload_of
from trainer.protocol.config import ValidationConfig
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.data import TokenData
from trainer.worker.train_loop.validation import Validation, held_out_validation
from trainer.worker.workload import Mean, WorkloadError

MakeRank = Callable[..., OneRank]
HERE = "tests.trainer.worker.train_loop.test_validation_of_one_rank"


def test_a_stop_leaves_the_validation_of_its_step_to_the_next_start(one_rank: MakeRank) -> None:
    run = one_rank(workload=VALIDATED, validation={"every": 4}, checkpoint={"every": 0})
    ask(run, StopReason.PREEMPTION, at=4)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    assert (run.state.step, run.saver.tried, run.validated()) == (4, [4], [])
    run.restart()
    assert run.train() == ExitCode.FINISHED
    assert run.validated() == [4, 8]


def test_a_validation_that_a_stop_left_out_rates_the_checkpoint_of_its_step(one_rank: MakeRank) -> None:
    best = {"every": 0, "best": {"metric": "batches"}}
    run = one_rank(workload=VALIDATED, validation={"every": 4}, checkpoint=best)
    ask(run, StopReason.PREEMPTION, at=4)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    assert "batches" not in run.saver.facts[4]["metrics"]
    rated: dict[int, Any] = {}
    workload: Any = run.session.objects.workload
    workload.at = lambda number: rated.update(run.saver.facts) if number == 5 else None
    run.restart()
    assert run.train() == ExitCode.FINISHED
    assert (run.saver.tried, run.validated()) == ([4, 4, 8], [4, 8])
    assert (rated[4]["metrics"], rated[4]["validated"]) == ({"batches": 4.0}, 4), "before the next step"


def test_a_validation_that_a_stop_left_out_saves_nothing_that_it_does_not_rate(one_rank: MakeRank) -> None:
    best = {"every": 0, "best": {"metric": "loss"}}
    run = one_rank(workload=VALIDATED, validation={"every": 4}, checkpoint=best)
    ask(run, StopReason.PREEMPTION, at=4)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    run.restart()
    assert run.train() == ExitCode.FINISHED
    assert (run.saver.tried, run.validated()) == ([4, 8], [4, 8])


def test_a_validation_without_a_value_of_the_best_metric_rates_no_checkpoint(one_rank: MakeRank) -> None:
    best = {"every": 0, "best": {"metric": "batches"}}
    run = one_rank(workload=VALIDATED, validation={"every": 2}, checkpoint=best)
    workload: Any = run.session.objects.workload
    values = iter([Mean(1.0), Mean(0.0, weight=0), None, Mean(4.0)])
    workload.validate = lambda model: {"batches": next(values)}
    assert run.train() == ExitCode.FINISHED
    rated = {step: facts["metrics"].get("batches") for step, facts in run.saver.facts.items()}
    assert rated == {2: 1.0, 4: None, 6: None, 8: 4.0}


def test_a_plateau_is_judged_by_the_first_number_alone(one_rank: MakeRank) -> None:
    objects = one_rank(workload=VALIDATED).session.objects
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(objects.optimizer)
    workload: Any = objects.workload
    values = iter([None, Mean(3.0)])
    workload.validate = lambda model: {"first": next(values), "second": 1.0}
    validation = Validation(replace(objects, scheduler=scheduler), ValidationConfig(every=1), last=8)
    assert validation.run() == {"second": 1.0}
    assert scheduler.last_epoch == 0
    validation.run()
    assert (scheduler.last_epoch, scheduler.best) == (1, 3.0)


def test_a_stop_in_the_last_step_leaves_its_validation_until_the_state_is_saved(one_rank: MakeRank) -> None:
    best = {"every": 0, "best": {"metric": "batches"}}
    run = one_rank(workload=VALIDATED, checkpoint=best)
    saved: list[int] = []
    workload: Any = run.session.objects.workload
    validate = workload.validate
    workload.validate = lambda model: saved.extend(run.saver.tried) or validate(model)
    ask(run, StopReason.PREEMPTION, at=8)
    assert run.train() == ExitCode.FINISHED
    assert (saved, run.saver.tried, run.validated()) == ([8], [8, 8], [8])
    assert run.saver.facts[8]["metrics"] == {"batches": 8.0}


def test_a_save_that_is_asked_for_leaves_no_validation_out(one_rank: MakeRank) -> None:
    run = one_rank(workload=VALIDATED, validation={"every": 4}, checkpoint={"every": 0})
    ask(run, StopReason.SAVE_AND_GO_ON, at=4)
    assert run.train() == ExitCode.FINISHED
    assert (run.saver.tried, run.validated()) == ([4, 8], [4, 8])


def test_each_validation_is_saved_where_the_best_are_kept(one_rank: MakeRank) -> None:
    run = one_rank(workload=VALIDATED, validation={"every": 3}, checkpoint={"every": 0, "best": {"metric": "batches"}})
    assert run.train() == ExitCode.FINISHED
    assert run.saver.tried == [3, 6, 8]
    assert {step: facts["metrics"] for step, facts in run.saver.facts.items()} == {
        step: {"batches": float(step)} for step in (3, 6, 8)
    }


class Averaging(torch.optim.SGD):
    """Like schedule-free optimizers: weights are averages in evaluation mode."""

    mode = "train"

    def eval(self):
        self.mode = "eval"

    def train(self):
        self.mode = "train"

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)


class Averaged(Validated):
    def build_model(self):
        made = super().build_model()
        made[2].eval()
        return made

    def build_optimizer(self, model):
        self.optimizer = Averaging(model.parameters(), lr=0.1)
        return self.optimizer

    def validate(self, model):
        self.seen = (self.optimizer.mode, model.training, torch.is_grad_enabled(), float(torch.rand(1)))
        return {}


def test_a_validation_leaves_modes_generators_and_the_optimizer_as_they_were(one_rank: MakeRank) -> None:
    run = one_rank(workload=workload_of(HERE, "Averaged"), validation={"every": 2})
    workload: Any = run.session.objects.workload
    assert run.train() == ExitCode.FINISHED
    assert workload.seen[:3] == ("eval", False, False)
    assert workload.optimizer.mode == "train"
    modes = {name: module.training for name, module in run.session.objects.model.named_modules()}
    assert modes.pop("2") is False
    assert all(modes.values())
    calm = one_rank(workload=workload_of(HERE, "Averaged"), validation={"every": 0})
    calm.train()
    assert [event.data["step"] for event in calm.events("validated")] == [calm.state.step], "once, at the end"
    assert [line["loss"] for line in run.lines().values()] == [line["loss"] for line in calm.lines().values()]


class Merging(nn.Linear):
    """Like a low-rank adapter: evaluation adds it to the weight, `train(True)` removes it."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)


class Merges(Validated):
    def build_model(self) -> nn.Module:
        body = [nn.Linear(4, 8), nn.Sequential(Merging(8, 8), nn.Dropout(0.5).eval()), Merging(8, 1)]
        self.seen: list[bool] = []
        return nn.Sequential(*body)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.append(any(module.merged for module in model.modules() if isinstance(module, Merging)))
        return super().loss(model, batch)


def test_a_module_is_told_when_its_evaluation_is_over_and_frozen_ones_stay_so(one_rank: MakeRank) -> None:
    run = one_rank(workload=workload_of(HERE, "Merges"), validation={"every": 2})
    model = run.session.objects.model
    frozen = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    assert not frozen.training
    assert run.train() == ExitCode.FINISHED
    workload: Any = run.session.objects.workload
    assert workload.seen == [False] * 8
    assert not frozen.training


class Pretrained(Validated):
    def build_model(self) -> nn.Module:
        return super().build_model().eval()


def test_a_model_that_is_built_in_evaluation_mode_is_trained_in_training_mode(one_rank: MakeRank) -> None:
    run = one_rank(workload=workload_of(HERE, "Pretrained"))
    assert all(module.training for module in run.session.objects.model.modules())


class Plateau(Validated):
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    def validate(self, model):
        return {"first": 1.0, "second": float(self.data.consumed)}


def test_a_scheduler_on_a_plateau_steps_with_the_first_number_of_each_validation(one_rank: MakeRank) -> None:
    run = one_rank(workload=workload_of(HERE, "Plateau"), validation={"every": 2}, train={"steps": 6})
    assert run.train() == ExitCode.FINISHED
    rates = [line["lr"] for _, line in sorted(run.lines().items())]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05, 0.05])


def objects(data: Any) -> Any:
    return SimpleNamespace(data=data, workload=SimpleNamespace(loss=lambda _, batch: batch.double().mean()))


def test_the_mean_is_that_of_all_micro_batches_of_all_batches(text_tokens):
    train = TrainConfig(seq_len=16, batch_size=8, micro_batch_size=4)
    data = TokenData(text_tokens, train, shuffle=True, dp_rank=0, dp_size=1, device=torch.device("cpu"), held_out=2)
    rows = [part for batch in data.held_out() for part in batch]
    validate = held_out_validation(objects(data), 2)
    assert validate is not None
    found = cast(Mean, validate(torch.nn.Identity())["val_loss"])
    assert (float(found.value), found.weight) == (pytest.approx(float(torch.cat(rows).double().mean())), 1.0)


def test_nothing_is_validated_without_batches():
    assert held_out_validation(objects(None), 0) is None


def test_data_of_a_users_own_holds_nothing_out():
    class Points:
        pass

    with pytest.raises(WorkloadError, match="has no held-out batches.*write `validate`.*or set validation.batches=0"):
        held_out_validation(objects(Points()), 3)
