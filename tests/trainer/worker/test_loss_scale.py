"""float16: steps with overflowed gradients are skipped, and the scale survives a restart."""

import math

import pytest

from checkpointing.engine.audit.audit import audit_checkpoint
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from tests.trainer.conftest import hang
from trainer.protocol.failures.outcome import ExitCode
from trainer.worker.saved_state.checkpoint_contents import expected_entries
from trainer.worker.saved_state.loss_scale import FIRST, SMALLEST, LossScale

HALF = {"dtype": "float16", "steps": 12}
OVERFLOW = {"kind": "spike", "rank": 0, "step": 4}
"""A loss a thousand times as high, whose gradients overflow float16."""


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_two_thousand_steps():
    scale = LossScale("float16")
    assert scale.update_scale(math.inf)
    assert scale.update_scale(math.nan)
    assert scale.scale == FIRST / 4
    assert not any(scale.update_scale(1.0) for _ in range(1999))
    assert scale.scale == FIRST / 4
    again = LossScale("float16")
    again.restore(scale.facts())
    assert not again.update_scale(1.0)
    assert again.scale == FIRST / 2


def test_overflows_are_counted_over_restarts():
    scale = LossScale("float16")
    assert [scale.update_scale(norm) for norm in (math.inf, 1.0, math.nan)] == [True, False, True]
    again = LossScale("float16")
    again.restore(scale.facts())
    assert again.overflows == 2
    assert again.update_scale(math.inf)
    assert again.overflows == 3
    other = LossScale("float32")
    other.restore(again.facts())
    assert other.facts() == {"overflows": 3}, "the optimizer stays that far behind"


def test_an_overflow_at_the_smallest_scale_is_a_fault_of_the_run():
    scale = LossScale("float16")
    while scale.scale > SMALLEST:
        assert scale.update_scale(math.inf)
    assert not scale.update_scale(math.inf)


def test_other_precisions_have_no_scale():
    scale = LossScale("bfloat16")
    assert not scale.update_scale(math.inf)
    assert scale.scale == 1.0
    assert scale.facts() == {}


@pytest.mark.multi
@pytest.mark.proof
def test_a_killed_run_goes_on_with_the_scale_that_an_overflow_has_left(make_run, undisturbed):
    calm = undisturbed(2, train=HALF, drill={"events": [OVERFLOW]})
    lines = calm.metrics()
    assert lines[4]["overflowed"]
    assert [lines[step]["loss_scale"] for step in (4, 5)] == [FIRST, FIRST / 2]
    hurt = make_run(2, train=HALF, drill={"events": [OVERFLOW, *hang(1, step=9)["events"]]})
    assert hurt.train_until_killed(1, committed=6)["codes"] == [ExitCode.RETRY, -9], hurt.log()
    assert hurt.train()["codes"] == [0, 0], hurt.log()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]
    scales = [[line["loss_scale"] for _, line in sorted(run.metrics().items())] for run in (hurt, calm)]
    assert scales[0] == scales[1]


@pytest.mark.multi
def test_a_loss_that_overflows_costs_its_step_and_is_no_incident(make_run):
    target = {"target": "tests.trainer.worker.my_workload:Overflows", "args": {"width": 8}}
    run = make_run(1, workload=target, train={"steps": 16, "dtype": "float16"})
    assert run.train()["codes"] == [0], run.log()
    lines = run.metrics()
    assert lines[3]["overflowed"]
    assert not math.isfinite(float(lines[3]["loss"]))
    assert not lines[max(lines)]["overflowed"]
    assert lines[4]["loss_scale"] == lines[3]["loss_scale"] / 2


@pytest.mark.multi
def test_losses_that_are_no_numbers_one_after_the_other_are_an_incident(make_run):
    target = {"target": "tests.trainer.worker.my_workload:OverflowsForGood", "args": {"width": 8}}
    run = make_run(1, workload=target, train={"steps": 16, "dtype": "float16"})
    assert run.train()["codes"] == [ExitCode.ERROR], run.log()
    assert (run.outcome(0, 1).exception, run.outcome(0, 1).step) == ("BadStep", 4)


@pytest.mark.multi
def test_a_save_after_nothing_but_overflows_succeeds_also_after_a_restart(make_run):
    args = {"width": 8, "at": list(range(5, 13))}
    run = make_run(
        1, workload={"target": "tests.trainer.worker.my_workload:Overflows", "args": args}, train=HALF,
        checkpoint={"every": 4}, drill=hang(0, step=10),
    )  # fmt: skip
    assert run.train_until_killed(0, committed=8)["codes"] == [-9], run.log()
    assert run.train()["codes"] == [0], run.log()
    assert [step for step, line in sorted(run.metrics().items()) if line["overflowed"]] == [1, 2, *args["at"]]
    kinds = [event.kind for event in run.events()]
    assert "checkpoint.failed" not in kinds
    assert "checkpoint.doubted" not in kinds
    newest = max(Catalog(run.dir.checkpoints).committed_entries(), key=lambda entry: entry.step)
    report = audit_checkpoint(LocalStorage(run.dir.checkpoints), newest.name, 4, expect=expected_entries)
    assert (newest.step, report.faults) == (12, ())
