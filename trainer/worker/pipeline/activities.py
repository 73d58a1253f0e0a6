"""Who is told what a stage does at this moment: a meter, or the cell in which a rank says where it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from trainer.contract.ranks.stage_activity import AWAITED_SENDS, RECEIVES, Activity, Moment

__all__ = ["EXPOSED_SENDS", "WAITS", "Activity", "Moment", "Watcher", "watched"]

WAITS = RECEIVES
EXPOSED_SENDS = AWAITED_SENDS


class Watcher(Protocol):
    """Called on the thread that trains; one moment ends before the next one begins."""

    def begin(self, moment: Moment) -> None:
        """It begins now."""

    def end(self, moment: Moment) -> None:
        """It is over; not called for one that raised."""


@contextmanager
def watched(watchers: Sequence[Watcher], moment: Moment) -> Iterator[None]:
    """Tell all of them of what is inside."""
    for watcher in watchers:
        watcher.begin(moment)
    yield
    for watcher in watchers:
        watcher.end(moment)
