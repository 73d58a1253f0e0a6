"""Spike detection on tables and synthetic runs."""

import math
import random
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from trainer.protocol.config_sections.fault_detection_config import SpikeConfig
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.train_loop.reduction import RankZeroMessage, StepResult
from trainer.worker.train_loop.spikes import BadStep, LossSpike, SpikeDetector


def detector_with(*losses: float, **config: float) -> SpikeDetector:
    return SpikeDetector(SpikeConfig(**config), deque(losses))


def full(losses: list[float], **config: float) -> SpikeDetector:
    made = detector_with(**{"window": len(losses), **config})
    assert all(made.check(loss, 1.0) is None for loss in losses)
    return made


QUIET = [2.0 + 0.01 * (index % 5) for index in range(50)]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, -math.inf)])
def test_what_is_no_number_is_bad_from_the_first_step_on(loss, norm):
    losses = detector_with(deviations=0)
    assert losses.check(loss, norm) == f"loss {loss}, gradient norm {norm}"
    assert losses.check(1.0, 1.0) is None


@pytest.mark.parametrize(
    ("loss", "bad"),
    [
        (2.02, False),
        (2.9, False),  # many deviations, but not half again as much as usual
        (3.1, True),
        (2000.0, True),
        (0.0, False),  # a fall is no spike
        (-500.0, False),
    ],
)
def test_a_spike_is_far_above_the_window_and_half_again_its_median(loss, bad):
    assert (full(QUIET).check(loss, 1.0) is not None) == bad


def test_the_reason_gives_the_figures():
    reason = full(QUIET).check(2000.0, 1.0)
    assert reason is not None
    assert reason.startswith("loss 2000 is ")
    assert "above 2.02, the median of the 50 steps before it (detection.spike.deviations=20; if losses" in reason
    assert reason.endswith("if losses rise on purpose: detection.spike.deviations=0)")


def test_a_noisy_run_needs_more():
    noisy = [2.0 + (index * 7 % 20) * 0.1 for index in range(50)]
    assert full(noisy).check(6.0, 1.0) is None
    assert full(noisy).check(60.0, 1.0) is not None


def test_losses_near_zero_that_differ_by_factors_make_no_spike_of_the_highest():
    near_zero = [0.001 * 2.0 ** (index * 7 % 5 - 2) for index in range(50)]
    assert full(near_zero).check(0.03, 1.0) is None
    assert full(near_zero).check(40.0, 1.0) is not None


@pytest.mark.parametrize(
    ("losses", "loss", "bad"),
    [
        ([0.0] * 50, 0.005, False),  # policy gradients of equal rewards: a batch with a signal is the first of its kind
        ([0.0] * 49 + [0.004], 0.005, False),
        ([0.0] * 49 + [0.004], 4.0, True),
        ([0.001 * (index % 7 - 3) for index in range(50)], 0.05, False),
        ([0.001 * (index % 7 - 3) for index in range(50)], 5.0, True),
        ([0.0, *QUIET[1:]], 30.0, False),
        ([0.0, *QUIET[1:]], 3000.0, True),
    ],
)
def test_losses_around_zero_are_judged_by_their_largest_distance(losses, loss, bad):
    reason = full(losses).check(loss, 1.0)
    assert (reason is not None) == bad
    assert reason is None or "times the window's largest deviation above" in reason


@pytest.mark.parametrize(("loss", "accepted"), [(0.02, True), (0.05, False)])
def test_a_new_level_around_zero_is_at_most_ten_times_the_largest_distance(loss, accepted):
    around = deque([0.001 * (index % 7 - 3) for index in range(50)])
    detector = SpikeDetector(SpikeConfig(deviations=1), around)
    if accepted:
        detector.judge(result(loss), 59, 3)
        return
    with pytest.raises(LossSpike):
        detector.judge(result(loss), 59, 3)


def test_a_small_regression_that_converges_is_never_held():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer, detector = torch.optim.AdamW(model.parameters(), lr=1e-2), detector_with()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    lowest = math.inf
    for _ in range(400):
        x = torch.randn(16, 4)
        loss = functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert detector.check(loss.item(), 1.0) is None
        lowest = min(lowest, loss.item())
    assert lowest < 0.01


def test_losses_that_do_not_differ_at_all_have_a_floor():
    same = [2.0] * 50
    assert full(same).check(2.4, 1.0) is None
    assert full(same).check(3.01, 1.0) is not None  # 50 times one percent of the median
    assert full([0.0] * 50).check(0.0, 1.0) is None


@pytest.mark.parametrize(
    ("deviations", "loss", "bad"),
    [(100, 3.99, False), (100, 4.0, False), (100, 4.01, True), (1, 3.0, False), (1, 3.01, True)],
)
def test_the_floor_is_one_percent_of_the_median_and_limits_are_included(deviations, loss, bad):
    assert (full([2.0] * 50, deviations=deviations).check(loss, 1.0) is not None) == bad


@pytest.mark.parametrize(
    "losses", [[8.0, 1.0, 2.0, 8.0, 1.0, 4.0, 1.0, 8.0], [5.0, 1.0, 3.0, 2.0, 4.0, 2.0, 1.0, 4.0, 5.0]]
)
def test_the_median_of_an_even_window_lies_between_its_two_middle_losses(losses):
    assert "above 3, the median of" in str(full(losses).check(1e9, 1.0))


def test_nothing_is_judged_before_the_window_is_full():
    losses = detector_with(window=8)
    for _ in range(7):
        assert losses.check(2.0, 1.0) is None
    assert losses.check(4000.0, 1.0) is None
    assert losses.check(9000.0, 1.0) is not None


def test_a_bad_loss_does_not_become_usual():
    losses = full(QUIET)
    for _ in range(100):
        assert losses.check(500.0, 1.0) is not None
    assert losses.check(2.0, 1.0) is None


def test_zero_deviations_look_for_numbers_only():
    assert full(QUIET, deviations=0).check(1e9, 1.0) is None


def test_old_losses_leave_the_window():
    losses = full([50.0] * 8)
    for _ in range(8):
        assert losses.check(1.0, 1.0) is None
    assert losses.check(40.0, 1.0) is not None


def test_a_restored_window_judges_as_the_one_that_was_saved():
    window = deque([1000.0, *QUIET])
    losses = SpikeDetector(SpikeConfig(), window)
    assert losses.check(500.0, 1.0) == full(QUIET).check(500.0, 1.0)
    assert losses.check(2.5, 1.0) is None
    assert list(window) == [*QUIET[1:], 2.5], "the training state has the accepted losses, and no more of them"
    assert detector_with(*QUIET[1:]).check(500.0, 1.0) is None, "one too few"


def result(loss: float, step: int = 60) -> StepResult:
    return StepResult(step=step, loss=loss, grad_norm=1.0, stop=StopReason.NONE, message=RankZeroMessage())


@pytest.mark.parametrize(
    ("loss", "replaced", "raised"),
    [
        (8.0, 0, LossSpike),
        (8.0, 2, LossSpike),
        (8.0, 3, None),
        (8.0, 4, None),
        (20.3, 3, LossSpike),  # more than ten times 2.02
        (1e6, 30, LossSpike),
        (math.nan, 30, BadStep),
    ],
)
def test_as_many_spikes_as_may_be_skipped_show_a_new_level_if_they_are_of_its_order(loss, replaced, raised):
    levels: list[tuple[int, str]] = []
    detector = SpikeDetector(SpikeConfig(), window := deque(QUIET), lambda *level: levels.append(level))
    if raised is not None:
        with pytest.raises(raised) as caught:
            detector.judge(result(loss), 59, replaced)
        assert (type(caught.value), caught.value.position, levels) == (raised, 59, [])
        return
    detector.judge(result(loss), 59, replaced)
    assert list(window) == [loss], "the new level is known by its own losses"
    ((step, reason),) = levels
    assert (step, reason.endswith(f"deviations=0), like those of {replaced} skipped batches before it")) == (60, True)
    detector.judge(result(900.0, 61), 60, 0)


def test_without_rollbacks_no_level_is_accepted_before_a_batch_was_skipped():
    with pytest.raises(LossSpike):
        SpikeDetector(SpikeConfig(roll_backs=0), deque(QUIET)).judge(result(8.0), 59, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_no_spike(seed):
    chance, losses = random.Random(seed), detector_with()
    for step in range(3000):
        level = 2.0 + 8.0 * math.exp(-step / 200)
        loss = level * chance.lognormvariate(0, 0.1) * (2.0 if step % 500 == 499 else 1.0)
        assert losses.check(loss, 1.0) is None, step


@given(st.lists(st.floats(), min_size=1, max_size=60))
def test_ranks_judge_alike_and_a_judged_number_is_never_none(values):
    one, other = detector_with(window=8), detector_with(window=8)
    for value in values:
        reason = one.check(value, 1.0)
        assert reason == other.check(value, 1.0)
        assert reason is not None or math.isfinite(value)


def test_a_bad_step_says_where_its_batch_is():
    error = BadStep(7, 56, "loss nan, gradient norm 1.0")
    assert (error.step, error.position) == (7, 56)
    assert str(error).startswith("step 7: loss nan, gradient norm 1.0; its batch is at position 56 of the data")
