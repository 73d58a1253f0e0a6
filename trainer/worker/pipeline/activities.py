"""Who is told what a stage does at this moment: a meter, or the cell in which a rank says where it is."""

from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.contract.ranks.stage_activity import AWAITED_SENDS, RECEIVES, Activity, Moment

__all__ = ["EXPOSED_SENDS", "WAITS", "Activity", "Call", "Moment", "Watched", "Watcher"]

Call = Callable[[], None]

WAITS = RECEIVES
EXPOSED_SENDS = AWAITED_SENDS


class Watcher(Protocol):
    """Asked once for each moment of a step; what it answers is called in every step, on the thread that trains.

    One moment ends before the next one begins.
    """

    def begin_of(self, moment: Moment) -> Call | None:
        """To be called where it begins."""

    def end_of(self, moment: Moment) -> Call | None:
        """To be called where it is over; not for one that raised."""


class Watched:
    """What is inside it, in every step, is told to all of `watchers`.

    A call of Python's is cold between two passes of a model, and takes ten times as long as it does in a loop: there
    are as few of them here as can be.
    """

    __slots__ = ("_begins", "_ends", "moment")

    def __init__(self, watchers: Sequence[Watcher], moment: Moment) -> None:
        self.moment = moment
        self._begins = [call for watcher in watchers if (call := watcher.begin_of(moment))]
        self._ends = [call for watcher in watchers if (call := watcher.end_of(moment))]

    def __enter__(self) -> None:
        for begin in self._begins:
            begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            for end in self._ends:
                end()
