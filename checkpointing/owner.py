"""Whose checkpoints these are: one attempt of a run, and what it may load, commit and delete."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """One attempt; `fence` says whether it may still commit and delete.

    `inherit` are the checkpoints that its launch token lists. `ended_attempts` are earlier attempts, which write no
    more, as `<attempt>-<nonce>`: what they left half-written is debris.
    """

    attempt: int
    nonce: str
    inherit: tuple[str, ...]
    fence: Callable[[], bool]
    ended_attempts: tuple[str, ...] = ()
