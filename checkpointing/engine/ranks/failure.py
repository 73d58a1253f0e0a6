"""Failures of saves and loads: which exceptions count, what they say in words, and how one becomes a value."""

from collections.abc import Callable
from dataclasses import dataclass
from pickle import PickleError
from typing import TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.errors import CheckpointError, FencedOff, ManifestError, Refused, SaveFailed, Unsavable, Unsound
from checkpointing.storage.disk_errors import FULL

T = TypeVar("T")
F = TypeVar("F")

# Everything that reading, writing, torch and our own code may raise: a rank that fails in a collective operation must
# report it to its peers, or they wait for it. CheckpointException is a BaseException, so that it must be named.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    CheckpointError,
    CheckpointException,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    PickleError,
    RuntimeError,
    TypeError,
    ValueError,
)

_PASSING = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""What a save may raise and the next one may not: disks, memory and devices."""


def explain(error: BaseException) -> str:
    """One line for people: a full disk is called that, whatever torch raised."""
    if isinstance(error, (Refused, SaveFailed)):
        return error.reason
    if isinstance(error, OSError):
        return f"disk full ({error})" if error.errno in FULL else str(error) or type(error).__name__
    # torch's zip writer notices that fewer bytes arrived than it wrote, and says only where.
    if "unexpected pos" in str(error):
        return f"disk full (torch says: {_first_line(error)})"
    return f"{type(error).__name__}: {_first_line(error)}"


def is_damage(error: BaseException) -> bool:
    """Whether a load failed because of the checkpoint's bytes, not because of the program or the machine."""
    return error.damaged if isinstance(error, Refused) else isinstance(error, ManifestError)


def is_misfit(error: BaseException) -> bool:
    """Whether a load failed because the checkpoint is of another model."""
    return isinstance(error, Refused) and not error.fits


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


@peer_message
@dataclass(frozen=True)
class Failed:
    """What a rank sends instead of its result; `final` when trying again cannot help.

    `lasting` when no later save can help either: the program, or ours, would fail in the same way.
    """

    reason: str
    fenced: bool = False
    final: bool = False
    lasting: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        lasting = isinstance(error, Unsavable) or not isinstance(error, (*_PASSING, CheckpointError))
        return cls(
            explain(error), fenced=isinstance(error, FencedOff), final=isinstance(error, Unsound) or lasting,
            lasting=lasting,
        )  # fmt: skip

    def error(self, step: int) -> SaveFailed:
        """The exception that this is on every rank."""
        if self.fenced:
            return FencedOff(step, self.reason)
        if self.lasting:
            return Unsavable(step, self.reason)
        return Unsound(step, self.reason) if self.final else SaveFailed(step, self.reason)


def result_or(act: Callable[[], T], failed: Callable[[BaseException], F]) -> T | F:
    """Do one rank's part; `failed` makes a message of a failure, so that the peers are not left waiting."""
    try:
        return act()
    except FAILURES as error:
        return failed(error)


def result_or_failed(act: Callable[[], T]) -> T | Failed:
    """`result_or` for saves."""
    return result_or(act, Failed.of)
