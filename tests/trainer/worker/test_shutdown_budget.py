"""Time budget of the last checkpoint's copies."""

import pytest

from trainer.protocol.rank_progress.progress import ProgressCell, StopReason
from trainer.worker.main import seconds_left

NOW = 1000.0


@pytest.fixture
def cell():
    made = ProgressCell.create("leaving")
    yield made
    made.close()


def left(cell: ProgressCell, *, finished: bool) -> float:
    return seconds_left(cell, finished=finished, clock=lambda: NOW)()


def test_a_finished_run_takes_half_an_hour_at_most(cell: ProgressCell) -> None:
    assert left(cell, finished=True) == 1795.0


def test_a_finished_run_is_gone_before_it_would_be_asked_to_stop(cell: ProgressCell) -> None:
    cell.expect_stop(NOW + 90.0)
    assert left(cell, finished=True) == 85.0


@pytest.mark.parametrize("finished", [True, False])
def test_a_stop_leaves_what_the_agent_leaves(cell: ProgressCell, finished: bool) -> None:
    cell.expect_stop(NOW - 10.0)
    cell.ask_stop(StopReason.PREEMPTION, NOW + 20.0)
    assert left(cell, finished=finished) == 15.0


def test_a_stop_that_comes_meanwhile_shortens_it(cell: ProgressCell) -> None:
    seconds = seconds_left(cell, finished=True, clock=lambda: NOW)
    cell.ask_stop(StopReason.SAVE_AND_GO_ON, NOW + 3600.0)
    assert seconds() == 1795.0
    cell.ask_stop(StopReason.CANCEL, NOW + 3.0)
    assert seconds() == -2.0


def test_a_stop_of_which_this_rank_has_not_heard_yet_leaves_little(cell: ProgressCell) -> None:
    cell.expect_stop(NOW + 5000.0)
    assert left(cell, finished=False) == 15.0
