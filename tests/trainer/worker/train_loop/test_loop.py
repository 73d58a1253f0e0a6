"""A GPU that hangs is waited for in its step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from trainer.protocol.config import JobConfig
from trainer.protocol.rank_progress.progress import Phase, ProgressCell
from trainer.worker.train_loop.loop import Loop, PendingStep


def pending(step: int, result: Callable[[], object] | None = None) -> PendingStep:
    reduced: Any = SimpleNamespace(step=step, result=result)
    return PendingStep(reduced, step - 1, 0, 0.1, 1.0, (), False, {})


class Hung(Exception):
    """Stands for a wait that does not end."""


def test_a_gpu_that_hangs_is_waited_for_in_the_step_and_not_in_the_next_ones_data() -> None:
    cell, seen = ProgressCell.create(), []
    services: Any = MagicMock(cell=cell)
    services.saver.committed_step = 0
    services.save_schedule.save_seconds = 0.0
    loop = Loop(JobConfig(), MagicMock(), MagicMock(step=6, loss=1.0), services)

    def wait_for_the_gpu() -> None:
        seen.append((cell.read().phase, cell.read().step))
        raise Hung

    loop._pending = pending(6, wait_for_the_gpu)
    cell.enter(Phase.OPTIMIZER)
    cell.update(step=6)
    with pytest.raises(Hung):
        loop._end_step(pending(7))
    assert seen == [(Phase.OPTIMIZER, 6)]
    cell.close()
