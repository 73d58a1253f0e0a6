"""Restore tests of workloads and optimizers of the user's own: the same bits, whatever they keep."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.worker.restore_test.conftest import Subject
from tests.trainer.worker.saved_state.test_optimizers import setting
from trainer.contract.restore_test import Outcome

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(
    ("optimizer", "world", "kind"),
    [
        # Saved in the midst of an evaluation, it has other weights than it trains with.
        ("schedulefree:AdamWScheduleFree", 2, "AnyOptimizer"),
        ("torch.optim:AdamW", 2, "Stateful"),
        pytest.param("torch.optim:Adagrad", 1, "AnyOptimizer", marks=pytest.mark.proof),
        pytest.param("prodigyopt:Prodigy", 1, "AnyOptimizer", marks=pytest.mark.proof),
    ],
)
def test_they_are_restored_bit_for_bit(make_run: Any, tmp_path: Path, optimizer: str, world: int, kind: str) -> None:
    over = setting(optimizer, world, whole=world == 1, kind=kind)
    over["checkpoint"] = {"every": 4, "keep": 9}
    source = make_run(world, **over)
    assert source.train()["codes"] == [0] * world, source.log()
    subject = Subject(source.ranks, source, tmp_path, itertools.count(1))
    found = subject.verdict(subject.folder(8), world=world, parallel=over["parallel"])
    assert (found.outcome, found.evidence["compared"]) == (Outcome.RESTORED, 3), found
    assert found.evidence["exact"]
    # Data of the user's own may end with the last step: nothing is computed beyond it.
    last = subject.verdict(subject.folder(14), world=world, parallel=over["parallel"])
    assert (last.outcome, last.evidence["compared"]) == (Outcome.RESTORED, 0), last
