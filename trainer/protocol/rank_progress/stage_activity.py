"""The activity of a rank: micro-batch and stage, or a wait in a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Activity(StrEnum):
    """Activities of a rank, one at a time; a progress cell stores the index in this order, from 1 on."""

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
    REDUCE = "reduces gradients"  # over data-parallel ranks, once per step
    WAIT_IN_RING = "waits for keys and values of"


_ALL = tuple(Activity)
CODES = {activity: code for code, activity in enumerate(_ALL, 1)}
_PASSES = (Activity.FORWARD, Activity.BACKWARD)
"""Activities with phases of the same names."""
RECEIVES = (Activity.WAIT_FOR_ACTIVATION, Activity.WAIT_FOR_GRADIENT)
AWAITED_SENDS = (Activity.WAIT_FOR_SENT_ACTIVATION, Activity.WAIT_FOR_SENT_GRADIENT)
OF_ACTIVATIONS = (Activity.WAIT_FOR_ACTIVATION, Activity.SEND_ACTIVATION, Activity.WAIT_FOR_SENT_ACTIVATION)
"""Activities about activations, which go to the next stage; gradients go to the previous one."""


class StageActivity(NamedTuple):
    """An activity of a stage with a micro-batch; -1 for the reduction, which covers all.

    For a wait in a ring, `stage` is the global rank that this rank waits for.
    """

    activity: Activity
    stage: int
    micro_batch: int

    @property
    def code(self) -> int:
        """Return the number of its activity, from 1 on."""
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
    """Sending progress of a pipeline rank: counts of micro-batches for each of its stages."""

    after_step: int  # last step finished before these passes
    activations: tuple[int, ...]
    gradients: tuple[int, ...]

    def to_row(self) -> tuple[int, ...]:
        """Return the counts as numbers for the wire."""
        return (self.after_step, *self.activations, *self.gradients)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> "SentMessages | None":
        """Parse a row; None if it is invalid."""
        if len(row) < 3 or not len(row) % 2:
            return None
        half = len(row) // 2
        return cls(after_step=row[0], activations=tuple(row[1 : half + 1]), gradients=tuple(row[half + 1 :]))


def decode_activity(code: int, stage: int, micro_batch: int) -> StageActivity | None:
    """Return the moment for these numbers; None for 0 (no activity) and for unknown codes."""
    return StageActivity(_ALL[code - 1], stage, micro_batch) if 0 < code <= len(_ALL) else None
