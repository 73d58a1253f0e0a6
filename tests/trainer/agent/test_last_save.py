"""When an attempt begins to stop: as configured, or earlier when saves are slow, but never most of a short job."""

import pytest

from trainer.agent.attempt_state.stopping import Bounds, Stopping
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_progress.progress import ProgressCell, StopReason


def stopping(kind: str = "slurm", limit: str = "1:00:00", lead: float = 120.0) -> Stopping:
    return Stopping(kind=kind, started=0.0, limit=limit, signal_lead=lead, bounds=Bounds())


def took(save: float, step: float) -> ProgressReport:
    return ProgressReport(generation=1, save_seconds=save, step_seconds=step)


@pytest.mark.parametrize(
    ("kind", "save", "step", "at"),
    [
        ("slurm", 0.0, 0.0, 3600 - 120),
        ("slurm", 30.0, 5.0, 3600 - 120),  # 5 + 60 + 10 + 30 = 105 s: the configured lead is enough
        ("slurm", 300.0, 5.0, 3600 - 5 - traits("slurm").signal_early - 10 - 300),
        ("local", 300.0, 5.0, 3600 - 5 - 10 - 300),
        ("slurm", 30.0, 60.0, 3600 - 5 - traits("slurm").signal_early - 120 - 30),  # ranks agree within two steps
        ("slurm", 5000.0, 5.0, 1800),  # hopeless: half of the job is trained all the same
    ],
)
def test_the_stop_comes_early_enough_for_the_slowest_save_seen(kind, save, step, at):
    plan = stopping(kind)
    plan.record_timings([took(save, step), took(0.0, 0.0)])
    assert plan.stop_time == at
    assert not plan.is_due(at - 1)
    assert plan.is_due(at)
    early = traits(kind).signal_early
    assert plan.earliest_stop == min(at, 3600 - 120 - early)
    assert plan.on_deadline(at).reason is StopReason.TIME_LIMIT


def test_the_newest_word_counts_and_the_last_one_stays_when_there_is_none():
    plan = stopping()
    plan.record_timings([took(300.0, 60.0)])
    plan.record_timings([took(200.0, 1.0)])
    assert plan.stop_time == 3600 - 5 - 60 - 2 - 200
    plan.record_timings([ProgressReport(generation=0)])  # between two generations nobody knows
    plan.record_timings([took(0.0, 0.0)])  # nor at the beginning of one
    assert plan.stop_time == 3600 - 5 - 60 - 2 - 200


def test_the_schedulers_word_on_the_end_moves_the_plan():
    plan = stopping()
    plan.record_timings([took(300.0, 0.0)])
    plan.correct(7200.0)
    assert plan.stop_time == 7200 - 5 - 60 - 300


def test_a_job_without_a_limit_is_never_due():
    plan = stopping(limit="UNLIMITED")
    plan.record_timings([took(300.0, 0.0)])
    assert plan.stop_time is None
    assert plan.earliest_stop is None
    assert not plan.is_due(1e9)


def test_a_short_job_trains_at_least_half_of_its_time():
    assert stopping(limit="2", lead=120.0).stop_time == 60


def test_a_signal_that_comes_with_the_planned_stop_is_of_the_time_limit():
    plan = stopping()
    plan.record_timings([took(600.0, 0.0)])
    assert plan.on_signal("SIGUSR2", 3600 - 660).reason is StopReason.TIME_LIMIT
    assert stopping().on_signal("SIGUSR2", 3600 - 660).reason is StopReason.PREEMPTION


def test_new_ranks_have_the_time_of_a_stop_again_as_far_as_there_is_any():
    plan = stopping()
    assert plan.seconds_left(0.0) == float("inf")
    plan.on_request("enough", 100.0)
    assert plan.seconds_left(150.0) == 10.0
    plan.extend_for_new_ranks(150.0)
    assert plan.seconds_left(150.0) == 60.0
    plan.on_signal("SIGTERM", 160.0)  # whoever sends that will soon kill
    plan.extend_for_new_ranks(170.0)
    assert plan.seconds_left(170.0) == 10.0
    late = stopping()
    late.on_deadline(3500.0)
    late.extend_for_new_ranks(3520.0)
    assert late.seconds_left(3520.0) == 3600 - 5 - 3520


def test_the_cell_keeps_the_expected_stop_apart_from_what_is_asked():
    cell = ProgressCell.create()
    try:
        assert cell.read_expected_stop() == 0.0
        cell.expect_stop(1234.5)
        assert cell.read_expected_stop() == 1234.5
        assert cell.read_stop_request() == (StopReason.NONE, 0.0)
        cell.ask_stop(StopReason.SAVE_AND_GO_ON, 9.0)
        cell.update(step=3, save_seconds=1.5, step_seconds=0.25)
        assert cell.read_expected_stop() == 1234.5
        reading = cell.read()
        assert (reading.step, reading.save_seconds, reading.step_seconds) == (3, 1.5, 0.25)
    finally:
        cell.close()
