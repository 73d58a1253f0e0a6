"""Messages between an agent and a rank, over the rank's control socket."""

from dataclasses import dataclass
from typing import get_args

from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.codec import Direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """Rendezvous store of a generation, sent by rank 0 and passed on by agents to every other rank."""

    host: str
    port: int
    key: str  # key of the generation, in hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Measurements of a rank before its first step; higher is better."""

    matmul: float  # floating-point operations per second
    memory: float  # bytes per second
    pairs: tuple[tuple[int, float], ...]  # peer rank, seconds of the exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Reason of failing saves, and their bytes; an empty reason: saves work."""

    reason: str
    size: int


FromRank = Store | Speeds | Saves | RankEnd
FROM_RANK = Direction[FromRank](*get_args(FromRank))
TO_RANK = Direction[Store](Store)
