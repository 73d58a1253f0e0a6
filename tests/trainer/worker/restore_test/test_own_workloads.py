"""Restore tests of user workloads and optimizers reproduce the run bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.worker.restore_test import unusual_workload
from tests.trainer.worker.restore_test.conftest import Subject
from tests.trainer.worker.saved_state.test_optimizers import SAVED, STEPS, setting
from tests.trainer.worker.test_hooks import hooked
from trainer.protocol.restore_test import Outcome, RestoreVerdict

pytestmark = pytest.mark.multi


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["torch.optim:Adagrad", "prodigyopt:Prodigy"])
def test_they_are_restored_bit_for_bit(make_run: Any, tmp_path: Path, optimizer: str) -> None:
    over = setting(optimizer, 1, whole=True)
    over["checkpoint"] = {"every": SAVED, "keep": 9}
    source = make_run(1, **over)
    assert source.train()["codes"] == [0], source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    found = subject.verdict(subject.folder(2 * SAVED), world=1, parallel=over["parallel"])
    assert (found.outcome, found.evidence["compared"], found.evidence["exact"]) == (Outcome.RESTORED, 3, True), found


def test_all_they_keep_is_restored_bit_for_bit_and_other_layouts_draw_other_numbers(
    make_run: Any, tmp_path: Path
) -> None:
    over = setting("schedulefree:AdamWScheduleFree", 2, kind="StatefulAndDropping")
    over["checkpoint"] = {"every": SAVED, "keep": 9}
    source = make_run(2, **over)
    assert source.train()["codes"] == [0, 0], source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    same = subject.verdict(subject.folder(2 * SAVED), world=2, parallel=over["parallel"])
    assert (same.outcome, same.evidence["compared"], same.evidence["exact"]) == (Outcome.RESTORED, 3, True), same
    # Data of the user's own may end with the last step: nothing is computed beyond it.
    last = subject.verdict(subject.folder(STEPS), world=2, parallel=over["parallel"])
    assert (last.outcome, last.evidence["compared"]) == (Outcome.RESTORED, 0), last
    alone = subject.verdict(subject.folder(2 * SAVED), layout="1", world=1)
    assert (alone.outcome, alone.evidence["compared"]) == (Outcome.RESTORED, 0), alone
    assert "it draws random numbers, which differ on another layout: its steps are not compared" in alone.reason


def test_with_other_code_of_the_users_no_step_is_compared(make_run: Any, tmp_path: Path) -> None:
    source = make_run(1, train={"steps": 6}, checkpoint={"every": 3, "keep": 9})
    assert source.train()["codes"] == [0], source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    found = subject.verdict(subject.folder(3), world=1, differs=("code.user",))
    assert (found.outcome, found.evidence["compared"]) == (Outcome.RESTORED, 0), found
    assert "code.user" in found.reason
    other = subject.verdict(subject.folder(3), world=1, differs=("env.torch",))
    assert (other.outcome, other.evidence["compared"], other.evidence["exact"]) == (Outcome.RESTORED, 3, False), other


@pytest.mark.proof
def test_a_schedule_and_data_of_their_own_are_restored_and_another_layout_says_nothing(
    make_run: Any, tmp_path: Path
) -> None:
    source = make_run(2, **hooked(), parallel={"dp_shard": 2})
    assert source.train()["codes"] == [0, 0], source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    found = subject.verdict(subject.folder(8), world=2, parallel={"dp_shard": 2})
    assert (found.outcome, found.evidence["compared"], found.evidence["exact"]) == (Outcome.RESTORED, 3, True), found
    alone = subject.verdict(subject.folder(8), "1", world=1)
    assert alone.outcome == Outcome.NOT_COMPARABLE, alone
    assert "load_state_dicts" in alone.reason


def test_state_that_no_checkpoint_has_is_no_fault_of_one(make_run: Any, tmp_path: Path) -> None:
    workload = {"target": f"{unusual_workload.__name__}:Forgetful"}
    source = make_run(1, workload=workload, train={"steps": 6, "dtype": "float32"}, checkpoint={"every": 3, "keep": 9})
    assert source.train()["codes"] == [0], source.log()
    found = Subject(source.ranks, source, tmp_path, itertools.count(1)).verdict(
        next(source.dir.checkpoints.glob("step-00000003.*")), world=1
    )
    assert found.outcome == Outcome.NOT_COMPARABLE, found
    assert "no fault was found in the checkpoint" in found.reason


def verdict_on(subject: Subject, cpus: list[str], **args: Any) -> RestoreVerdict:
    over = {"workload": {"args": {"cpus": cpus, **args}}}
    return subject.verdict(subject.folder(2), world=2, parallel={"dp_shard": 2}, over=over)


def test_each_rank_is_compared_with_the_rank_of_its_number_and_all_judge_alike(make_run: Any, tmp_path: Path) -> None:
    workload = {"target": f"{unusual_workload.__name__}:OnNodes", "args": {"cpus": ["a", "b"]}}
    source = make_run(
        2, workload=workload, parallel={"dp_shard": 2}, train={"steps": 4, "dtype": "float32"},
        checkpoint={"every": 2, "keep": 9},
    )  # fmt: skip
    assert source.train()["codes"] == [0, 0], source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    same = verdict_on(subject, ["a", "b"])
    assert (same.outcome, same.evidence["exact"], same.evidence["other_software"]) == (Outcome.RESTORED, True, {}), same
    other = verdict_on(subject, ["a", "a"], scale=1.5)
    assert (other.outcome, other.evidence["exact"]) == (Outcome.NOT_COMPARABLE, False), other
    assert list(other.evidence["other_software"]) == ["kernel_settings"]
    assert "no bound is known" in other.reason
    refused = verdict_on(subject, ["a", "b"], odd=1)
    assert refused.outcome == Outcome.NOT_COMPARABLE, refused
    assert "the program cannot continue from it: " in refused.reason
