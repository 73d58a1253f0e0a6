"""What an agent and a rank say to each other, over the rank's control socket."""

from dataclasses import dataclass
from typing import get_args

from trainer.contract.messages.codec import Direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Where the ranks of a generation meet; rank 0 says it, and agents pass it on to every other rank."""

    host: str
    port: int
    key: str  # of the generation, in hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What a rank has measured before its first step; more is better."""

    matmul: float  # floating-point operations a second
    memory: float  # bytes a second
    pairs: tuple[tuple[int, float], ...]  # rank it exchanged data with, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Why saves of so many bytes fail; an empty reason: they work."""

    reason: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedEnd:
    """How a rank ends, by its own report; it reaches the agent when no file can be written."""

    exit_code: int
    step: int
    exception: str | None = None
    message: str | None = None
    secondary: bool = False
    position: int | None = None


FromRank = Store | Speeds | Saves | ReportedEnd
FROM_RANK = Direction[FromRank](*get_args(FromRank))
TO_RANK = Direction[Store](Store)
