"""How many seconds a rank that is done may stay, so that its last checkpoint reaches every tier."""

import time
from collections.abc import Callable

from trainer.contract.ranks.progress import ProgressCell, StopReason

_EXIT_MARGIN = 5.0
"""Seconds before the agent's deadline: for peers to meet, for the outcome and for the exit."""
_UNLIMITED, _PEERS_STOPPED = 1800.0, 20.0
"""Seconds without a deadline, and after a stop request that has reached other ranks only."""


def seconds_left(
    cell: ProgressCell, *, finished: bool, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Says, whenever it is asked, how many seconds are left; a stop that comes meanwhile shortens them."""
    began = clock()

    def left() -> float:
        reason, deadline = cell.read_stop_request()
        if reason <= StopReason.SAVE_AND_GO_ON:
            # A finished run that stayed until it is asked to stop would look like one that was cut short.
            deadline = cell.read_expected_stop() if finished else 0.0
        until = deadline or began + (_UNLIMITED if finished else _PEERS_STOPPED)
        return until - _EXIT_MARGIN - clock()

    return left
