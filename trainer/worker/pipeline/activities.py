"""What a stage does at this moment, for whoever watches: a meter, or the cell in which a rank says where it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple, Protocol


class Activity(StrEnum):
    """One thing at a time."""

    WAIT_FOR_ACTIVATION = "wait for an activation"
    WAIT_FOR_GRADIENT = "wait for a gradient"
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "gradient of activations"
    WEIGHT_GRADIENT = "gradient of weights"
    REDUCE = "reduction of gradients"  # over data-parallel ranks, once a step


WAITS = (Activity.WAIT_FOR_ACTIVATION, Activity.WAIT_FOR_GRADIENT)


class Moment(NamedTuple):
    """An activity of a stage with one micro-batch; -1 for the reduction, which is of all."""

    activity: Activity
    stage: int
    micro_batch: int


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
