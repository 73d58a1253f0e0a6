"""The save interval: formulas, bounds, and a simulation of the loss."""

import math
from dataclasses import replace
from random import Random

import pytest

from checkpointing import save_interval
from checkpointing.save_interval import SaveCosts

HOUR = 3600.0
STEADY = SaveCosts(step=1.0, stall=2.0, save=30.0)


@pytest.mark.parametrize(
    ("cost", "mtbf", "seconds"),
    [
        (0.0, 24 * HOUR, 0.0),
        (2.0, 24 * HOUR, 587.878),  # Young: sqrt(2 * 2 * 86400)
        (0.02, HOUR, 12.0),
        (60.0, HOUR, 617.876),  # Daly: 657.267 * (1 + 0.09129 / 3 + 0.00833 / 9) - 60
        (7200.0, HOUR, HOUR),  # more than two failures apart: save as often as it fails
    ],
)
def test_the_optimum(cost, mtbf, seconds):
    assert save_interval.optimal(cost, mtbf) == pytest.approx(seconds, rel=5e-3)


def test_the_two_formulas_meet():
    below, above = save_interval.optimal(0.999e-3 * HOUR, HOUR), save_interval.optimal(1.001e-3 * HOUR, HOUR)
    assert below == pytest.approx(above, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "mtbf", "steps", "why"),
    [
        (STEADY, 24 * HOUR, 588, "a save costs 2 s, a failure occurs every 24.0 h"),
        (replace(STEADY, slowdown=6.0), 24 * HOUR, 1176, "a save costs 8 s"),
        (replace(STEADY, stall=0.0), 24 * HOUR, 31, "but a save takes 30 s"),
        (replace(STEADY, save=900.0), 24 * HOUR, 901, "but a save takes 15.0 min"),
        (SaveCosts(step=60.0, stall=1.0), HOUR, 10, "at least checkpoint.auto.least=10"),
        (replace(STEADY, step=0.001), 24 * HOUR, 5000, "but at most 5000 steps"),
    ],
)
def test_steps_between_saves(measured, mtbf, steps, why):
    found = save_interval.interval(measured, mtbf, least=10, most=5000)
    assert found.steps == steps
    assert why in found.reason


def test_small_changes_of_the_interval_are_ignored():
    assert not save_interval.differs_enough(100, 120)
    assert save_interval.differs_enough(100, 121)
    assert save_interval.differs_enough(100, 79)


@pytest.mark.parametrize(
    ("interval", "failures", "steps"),
    [(100, 1, 10), (100, 2, 20), (100, 3, 40), (100, 5, 100), (5, 1, 1), (5, 3, 4), (1, 1, 1), (0, 1, 10), (7, 99, 7)],
)
def test_the_pause_after_a_failed_save(interval, failures, steps):
    assert save_interval.retry_after(interval, failures) == steps


@pytest.mark.parametrize(
    ("left", "interval", "save", "held"),
    [
        (1000.0, 600.0, 30.0, False),
        (301.0, 600.0, 30.0, False),
        (299.0, 600.0, 30.0, True),
        (299.0, 10.0, 400.0, True),  # it would not be committed before the stop's own save
        (-1.0, 600.0, 30.0, False),  # the stop did not come: its time has passed
    ],
)
def test_no_save_shortly_before_a_stop_saves_anyway(left, interval, save, held):
    assert save_interval.skip_before_stop(left, interval=interval, save=save) is held


def test_the_last_save_is_planned_from_the_end():
    at = save_interval.last_save_before(10_000.0, save=300.0, step=20.0, slop=60.0, margin=5.0)
    assert at == 10_000 - 5 - 60 - 2 * 20 - 300
    later = save_interval.last_save_before(10_000.0, save=3.0, step=20.0, slop=0.0, margin=5.0)
    assert later > at


@pytest.mark.parametrize(
    ("samples", "share", "value"),
    [
        ([], 0.99, 0.0),
        ([3.0], 0.99, 3.0),
        ([1.0, 9.0, 2.0], 0.99, 9.0),
        (list(range(1, 101)), 0.99, 99),
        ([4, 1], 0.5, 1),
    ],
)
def test_quantiles(samples, share, value):
    assert save_interval.quantile(samples, share) == value


def lost(interval: float, measured: SaveCosts, mtbf: float, seed: int, work: float = 400 * HOUR) -> float:
    """Share of time lost by a run that saves every `interval` seconds of work and fails by chance."""
    rng = Random(seed)
    clock = saved = done = 0.0
    fails = rng.expovariate(1 / mtbf)
    while saved < work:
        ends = clock + interval + measured.cost
        if fails < ends:
            clock, done = fails, saved
            fails = clock + rng.expovariate(1 / mtbf)
            continue
        clock, done = ends, done + interval
        saved = done
    return 1 - work / clock


def lost_share(interval: float, measured: SaveCosts, mtbf: float) -> float:
    """The share of time that saves and failures take, to first order: half an interval and a save in flight."""
    return measured.cost / (interval + measured.cost) + (interval / 2 + measured.save) / mtbf


def test_the_chosen_interval_loses_less_than_fixed_ones():
    """No fixed interval is near the optimum on all of these clusters; the chosen one is."""
    worst_of_fixed = dict.fromkeys((60.0, 600.0, 3600.0), 0.0)
    for cost, mtbf in ((0.07, HOUR), (2.0, 8 * HOUR), (30.0, 24 * HOUR), (60.0, HOUR)):
        measured = SaveCosts(step=1.0, stall=cost)
        seeds = range(3)
        chosen = save_interval.interval(measured, mtbf, least=1, most=10**9).steps * measured.step
        mine = sum(lost(chosen, measured, mtbf, seed) for seed in seeds) / 3
        grid = [chosen * factor for factor in (0.25, 0.5, 2.0, 4.0)]
        others = [sum(lost(length, measured, mtbf, seed) for seed in seeds) / 3 for length in grid]
        assert mine < min(others) * 1.05, f"cost {cost}, mtbf {mtbf}: {mine} against {others}"
        expected = lost_share(chosen, measured, mtbf)
        assert mine == pytest.approx(expected, rel=0.25)
        for length in worst_of_fixed:
            there = sum(lost(length, measured, mtbf, seed) for seed in seeds) / 3
            worst_of_fixed[length] = max(worst_of_fixed[length], there / mine)
    assert min(worst_of_fixed.values()) > 1.4, worst_of_fixed


def test_the_optimum_is_a_minimum_of_the_expected_loss():
    for cost, mtbf in ((0.5, HOUR), (5.0, 24 * HOUR)):
        measured = SaveCosts(step=1.0, stall=cost, save=20.0)
        best = lost_share(save_interval.optimal(cost, mtbf), measured, mtbf)
        for factor in (0.7, 1.4):
            assert lost_share(factor * save_interval.optimal(cost, mtbf), measured, mtbf) > best
    assert math.isclose(lost_share(100.0, SaveCosts(step=1.0, stall=0.0), 1000.0), 0.05)
