"""Stop votes, and requests that are served once."""

import pytest

from trainer.protocol.rank_progress.progress import ProgressCell, StopReason
from trainer.worker.train_loop.reduction import agreed_stop, stop_votes
from trainer.worker.train_loop.save_schedule import StopFlag


@pytest.fixture
def cell():
    cell = ProgressCell.create()
    yield cell
    cell.close()


def test_the_highest_reason_of_any_rank_wins():
    ranks = [StopReason.NONE, StopReason.CANCEL, StopReason.TIME_LIMIT, StopReason.SAVE_AND_GO_ON]
    sums = [sum(column) for column in zip(*(stop_votes(reason) for reason in ranks), strict=True)]
    assert agreed_stop(sums) == StopReason.TIME_LIMIT


def test_nobody_asks():
    assert agreed_stop(stop_votes(StopReason.NONE)) == StopReason.NONE


def test_a_save_is_served_once_until_the_agent_has_cleared_it(cell):
    flag = StopFlag(cell)
    cell.ask_stop(StopReason.SAVE_AND_GO_ON)
    assert flag.stop_vote() == StopReason.SAVE_AND_GO_ON
    flag.mark_served()
    assert flag.stop_vote() == StopReason.NONE
    cell.ask_stop(StopReason.NONE)
    assert flag.stop_vote() == StopReason.NONE
    cell.ask_stop(StopReason.SAVE_AND_GO_ON)
    assert flag.stop_vote() == StopReason.SAVE_AND_GO_ON


def test_a_served_save_does_not_hide_a_later_stop(cell):
    flag = StopFlag(cell)
    cell.ask_stop(StopReason.SAVE_AND_GO_ON)
    flag.mark_served()
    cell.ask_stop(StopReason.PREEMPTION)
    assert flag.stop_vote() == StopReason.PREEMPTION


def test_a_stop_stays_asked_for(cell):
    flag = StopFlag(cell)
    cell.ask_stop(StopReason.CANCEL)
    flag.mark_served()
    assert flag.stop_vote() == StopReason.CANCEL
