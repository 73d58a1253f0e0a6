"""The learning rate is a pure function of the step."""

import pytest

from trainer.protocol.config import OptimizerConfig
from trainer.worker.optimizer import learning_rate

OPTIMIZER = OptimizerConfig(warmup_steps=10, lr=1.0, min_lr_ratio=0.1)


@pytest.mark.parametrize(("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1)])
def test_warm_up_then_cosine(step, rate):
    assert learning_rate(OPTIMIZER, 110, step) == pytest.approx(rate)


def test_without_warm_up_it_begins_near_the_peak():
    assert learning_rate(OptimizerConfig(warmup_steps=0, lr=1.0), 100, 1) == pytest.approx(1.0, abs=1e-3)


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert [learning_rate(OPTIMIZER, 4, step) for step in (1, 4)] == pytest.approx([0.1, 0.4])
