"""The activity of a rank: micro-batch and stage, or a wait in a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Activity(StrEnum):
    """One thing at a time; a progress cell holds its place in this order, from 1 on."""

    WAIT_FOR_ACTIVATION = "waits for the activation of"
    WAIT_FOR_GRADIENT = "waits for the gradient of"
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "gradients of activations"
    WEIGHT_GRADIENT = "gradients of weights"
    SEND_ACTIVATION = "sends the activation of"
    SEND_GRADIENT = "sends the gradient of"
    WAIT_FOR_SENT_ACTIVATION = "waits for a stage to take the activation of"
    WAIT_FOR_SENT_GRADIENT = "waits for a stage to take the gradient of"
    REDUCE = "reduces gradients"  # over data-parallel ranks, once a step
    WAIT_IN_RING = "waits for keys and values of"


_ALL = tuple(Activity)
CODES = {activity: code for code, activity in enumerate(_ALL, 1)}
_PASSES = (Activity.FORWARD, Activity.BACKWARD)
"""Their phases have the same names."""
RECEIVES = (Activity.WAIT_FOR_ACTIVATION, Activity.WAIT_FOR_GRADIENT)
AWAITED_SENDS = (Activity.WAIT_FOR_SENT_ACTIVATION, Activity.WAIT_FOR_SENT_GRADIENT)
OF_ACTIVATIONS = (Activity.WAIT_FOR_ACTIVATION, Activity.SEND_ACTIVATION, Activity.WAIT_FOR_SENT_ACTIVATION)
"""Activations go to the next stage, gradients to the one before."""


class Moment(NamedTuple):
    """An activity of a stage with one micro-batch; -1 for the reduction, which is of all.

    Of a wait in a ring, `stage` is the rank of the world that is waited for.
    """

    activity: Activity
    stage: int
    micro_batch: int

    @property
    def code(self) -> int:
        """The number that stands for its activity, from 1 on."""
        return CODES[self.activity]

    def __str__(self) -> str:
        stage = f"stage {self.stage}"
        if self.activity is Activity.WAIT_IN_RING:
            return f"{self.activity} rank {self.stage}"
        if self.activity is Activity.REDUCE:
            return f"{self.activity}, {stage}"
        if self.activity in _PASSES:
            return f"micro-batch {self.micro_batch}, {stage}"
        joint = " " if self.activity.endswith("of") else ", "
        return f"{self.activity}{joint}micro-batch {self.micro_batch}, {stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessages:
    """How far a rank of a pipeline has come with sending: the numbers count micro-batches, of each of its stages."""

    after_step: int  # the last step that it had finished when it began these passes
    activations: tuple[int, ...]
    gradients: tuple[int, ...]

    def to_row(self) -> tuple[int, ...]:
        """As numbers, for the wire."""
        return (self.after_step, *self.activations, *self.gradients)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> "SentMessages | None":
        """None for a row that is none."""
        if len(row) < 3 or not len(row) % 2:
            return None
        half = len(row) // 2
        return cls(after_step=row[0], activations=tuple(row[1 : half + 1]), gradients=tuple(row[half + 1 :]))


def moment_of(code: int, stage: int, micro_batch: int) -> Moment | None:
    """The moment of these numbers; None for 0, where a rank is in none, and for a number that means nothing here."""
    return Moment(_ALL[code - 1], stage, micro_batch) if 0 < code <= len(_ALL) else None
