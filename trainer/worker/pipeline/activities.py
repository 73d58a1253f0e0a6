"""Who is told what a stage does at this moment: a meter, or the cell in which a rank says where it is."""

from collections.abc import Sequence
from typing import Protocol

from trainer.contract.ranks.stage_activity import AWAITED_SENDS, RECEIVES, Activity, Moment

__all__ = ["EXPOSED_SENDS", "WAITS", "Activity", "Moment", "Watched", "Watcher"]

WAITS = RECEIVES
EXPOSED_SENDS = AWAITED_SENDS


class Watcher(Protocol):
    """Called on the thread that trains; one moment ends before the next one begins."""

    def begin(self, moment: Moment) -> None:
        """It begins now."""

    def end(self, moment: Moment) -> None:
        """It is over; not called for one that raised."""


class Watched:
    """What is inside it is told to all of `watchers`: a class, since a generator costs a step of small stages 1 %."""

    __slots__ = ("_moment", "_watchers")

    def __init__(self, watchers: Sequence[Watcher], moment: Moment) -> None:
        self._watchers, self._moment = watchers, moment

    def __enter__(self) -> None:
        for watcher in self._watchers:
            watcher.begin(self._moment)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            for watcher in self._watchers:
                watcher.end(self._moment)
