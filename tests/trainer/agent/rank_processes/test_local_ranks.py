"""What an agent reads from its ranks' cells, and what it puts there."""

from collections.abc import Iterator

import pytest

from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.protocol.rank_progress.progress import Phase, StopReason


@pytest.fixture
def ranks() -> Iterator[LocalRanks]:
    made = LocalRanks(1, range(2))
    yield made
    made.close()


def test_a_restored_step_is_not_a_trained_one_whenever_it_is_looked_at(ranks):
    cells = [local.cell for local in ranks.by_rank.values()]
    for cell in cells:
        cell.update(phase=Phase.RESTORE, step=500, saved_step=500, restored_step=500)
        # Nobody looked before the rank had gone on to its first step.
        cell.update(phase=Phase.FORWARD)
    assert (ranks.summary().stepped, ranks.summary().loss) == (False, None)
    cells[0].update(step=501, loss=0.5)
    assert ranks.summary().loss == 0.5
    assert not ranks.summary().stepped
    cells[1].update(step=501)
    assert ranks.summary().stepped


def test_a_stop_is_not_lost_when_a_save_is_asked_for_after_it(ranks):
    ranks.ask(StopReason.SAVE_AND_GO_ON, 5.0)
    ranks.ask(StopReason.PREEMPTION, 60.0)
    ranks.ask(StopReason.SAVE_AND_GO_ON, 3600.0)
    ranks.ask(StopReason.CANCEL, 3600.0)
    asked = [local.cell.read_stop_request() for local in ranks.by_rank.values()]
    assert asked == [(StopReason.PREEMPTION, 60.0)] * 2
