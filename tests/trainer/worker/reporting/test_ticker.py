import ctypes
import time
from types import SimpleNamespace
from typing import cast

import pytest

from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.worker.reporting.phase_tracker import ProgressTicker


def test_it_ticks_until_it_is_stopped() -> None:
    cell = ProgressCell.create()
    ticker = ProgressTicker(cell, seconds=0.001)
    ticker.start()
    first = cell.last_tick_ns()
    while cell.last_tick_ns() == first:
        time.sleep(0.001)
    ticker.stop()
    last = cell.last_tick_ns()
    assert last > first > -1
    time.sleep(0.01)
    assert cell.last_tick_ns() == last
    cell.close()


@pytest.mark.parametrize(("library", "held"), [(ctypes.PyDLL, True), (ctypes.CDLL, False)])
def test_it_stands_still_while_the_lock_is_held(library: type[ctypes.CDLL], *, held: bool) -> None:
    ticks: list[int] = []
    cell = SimpleNamespace(tick=lambda: ticks.append(1))
    ticker = ProgressTicker(cast(ProgressCell, cell), seconds=0.001)
    sleep = library(None).usleep  # a PyDLL keeps the lock over its calls
    ticker.start()

    def stands_still() -> bool:
        before = len(ticks)
        sleep(300_000)
        return len(ticks) - before <= 2

    # On a busy machine it may tick before the lock is taken, or not get to tick at all: not time after time.
    found = any(stands_still() is held for _ in range(10))
    ticker.stop()
    assert found
