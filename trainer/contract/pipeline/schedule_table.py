"""PURE: a schedule as a table: what each rank of a pipeline does, one after the other."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does, with the letters of torch's tables."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of activations and of weights
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Action(NamedTuple):
    """One entry; `micro_batch` is -1 for what is done once for a stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


Table = Sequence[Sequence[Action]]
"""By rank of the pipeline."""


def activations_held(table: Table) -> list[int]:
    """The most pairs of a stage and a micro-batch for which each rank keeps activations at a time.

    They are kept from the forward pass to the last gradient that is computed from them.
    """
    most = []
    for actions in table:
        held = high = 0
        for action in actions:
            held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
            high = max(high, held)
        most.append(high)
    return most
