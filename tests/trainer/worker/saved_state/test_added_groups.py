"""Parameter groups added during training are refused; groups with a rate of zero survive a kill."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.conftest import hang
from trainer.protocol.failures.outcome import ExitCode
from trainer.worker.saved_state.group_values import GroupValues
from trainer.worker.workload import WorkloadError

HERE = "tests.trainer.worker.my_workload"
OVER: dict[str, Any] = {"train": {"steps": 8, "dtype": "float32"}, "validation": {"every": 3}}


def workload(name: str, adds_in: str) -> dict[str, Any]:
    return {"target": f"{HERE}:{name}", "args": {"width": 8, "adds_in": adds_in}}


@pytest.mark.parametrize("change", ["added", "removed"])
def test_other_groups_than_build_optimizer_made_are_refused_with_what_to_do(change: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}], lr=0.1)
    values = GroupValues(optimizer, {parameter: name for name, parameter in model.named_parameters()})
    values.refuse_other_groups()
    if change == "added":
        optimizer.add_param_group({"params": [model.bias]})
    else:
        optimizer.param_groups.clear()
    with pytest.raises(
        WorkloadError, match=r"build_optimizer created 1: .* Create all groups in build_optimizer, .*lr_scale"
    ):
        values.refuse_other_groups()
    with pytest.raises(WorkloadError, match="build_optimizer created 1"):
        values.tensors()


@pytest.mark.multi
@pytest.mark.parametrize("adds_in", ["loss", "validate"])
def test_a_group_that_is_added_during_training_ends_the_run_at_once(make_run: Any, adds_in: str) -> None:
    run = make_run(1, workload=workload("AddsAGroup", adds_in), **OVER, checkpoint={"every": 3})
    answer = run.train()
    assert (answer["codes"], answer["steps"]) == ([ExitCode.NEVER_RETRY], [3 if adds_in == "validate" else 2]), (
        run.log()
    )
    assert "AdamW has 2 parameter groups, but build_optimizer created 1" in (run.outcome(0, 1).message or "")


@pytest.mark.multi
def test_a_group_that_was_given_a_rate_of_zero_trains_later_also_after_a_kill(make_run: Any) -> None:
    hurt = make_run(1, workload=workload("Thaws", ""), **OVER, checkpoint={"every": 4}, drill=hang(0, step=8))
    assert hurt.train_until_killed(0, committed=4, recorded=6)["codes"] == [-9], hurt.log()
    assert hurt.train()["codes"] == [0], hurt.log()
    hurt.assert_trained_again(5, 6)
