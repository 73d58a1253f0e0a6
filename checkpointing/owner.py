"""Attempt that owns checkpoints: which ones it may load, commit and delete."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """An attempt; `fence` returns whether it may still commit and delete.

    `inherit` lists the checkpoints in its launch token. `ended_attempts` are earlier attempts that no longer write, as
    `<attempt>-<nonce>`; their unfinished checkpoints are debris.
    """

    attempt: int
    nonce: str
    inherit: tuple[str, ...]
    fence: Callable[[], bool]
    ended_attempts: tuple[str, ...] = ()
