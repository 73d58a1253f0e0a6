"""Checkpoints that a restore may try, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.format.commit import parse_name


@peer_message
@dataclass(frozen=True)
class Candidate:
    """A checkpoint in a tier: `place` is the tier's number, -1 for memory."""

    step: int
    name: str
    place: int
    foreign: bool = False


def rank_candidate(candidate: Candidate) -> tuple[Any, ...]:
    """Return a sort key: newest step first, then the fastest tier, then the latest attempt and take."""
    parts = parse_name(candidate.name)
    latest = (-parts.attempt, -parts.take, parts.nonce) if parts is not None else (0, 0, candidate.name)
    return -candidate.step, candidate.place, *latest


def newer_names(names: Sequence[str], found: Sequence[Candidate]) -> list[str]:
    """Return the `names` newer than every candidate in `found`, newest first."""
    known = [parts for candidate in found if (parts := parse_name(candidate.name)) is not None]
    newest = max(known, default=None)
    parsed = [parts for name in names if (parts := parse_name(name)) is not None]
    return [str(parts) for parts in sorted(parsed, reverse=True) if newest is None or parts > newest]
