"""TrainingSpeed of a run by its newest steps: step time, and where the loss goes."""

import pytest

from orchestrator.cli.live_jobs.top import TrainingSpeed, training_speed
from orchestrator.cli.runs.run_reader import StepMetrics


def trained(
    first: int, last: int, *, seconds: float = 0.1, wall: float = 0.2, generation: int = 1, at: float = 1000.0,
    loss: float = 4.0, slope: float = -0.01,
) -> list[StepMetrics]:  # fmt: skip
    """Steps that take `seconds` each and follow each other every `wall` seconds."""
    return [
        StepMetrics(
            attempt=1, generation=generation, step=step, loss=loss + slope * (step - first), tokens_per_s=None,
            time=at + wall * (step - first), seconds=seconds,
        )
        for step in range(first, last + 1)
    ]  # fmt: skip


def test_a_step_has_only_its_own_time() -> None:
    found = training_speed(trained(1, 101))
    assert found.step_seconds == pytest.approx(0.1)
    assert (found.loss_change, found.loss_steps) == (pytest.approx(-1.0), 100)


def test_a_generation_before_it_is_no_measure() -> None:
    again = trained(60, 70, generation=2, seconds=1.0, at=2000.0)
    found = training_speed([*trained(1, 99), *again])
    assert found.step_seconds == pytest.approx(1.0)
    assert found.loss_steps == 10


def test_a_noisy_step_is_no_trend() -> None:
    steps = trained(1, 100, slope=0.0)
    spike = StepMetrics(attempt=1, generation=1, step=101, loss=40.0, tokens_per_s=None, time=1030.0)
    words = StepMetrics(attempt=1, generation=1, step=102, loss="nan", tokens_per_s=None, time=1031.0)
    change = training_speed([*steps, spike, words]).loss_change
    assert change is not None
    assert change < 3.0


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_steps_say_nothing(count: int) -> None:
    steps = trained(1, 1)[:count]
    assert training_speed(steps) == TrainingSpeed(step_seconds=0.1 if count else None)
