"""The process groups of a rank, in a file beside its flight socket: gloo's own records name no ranks."""

from collections.abc import Iterable
from functools import lru_cache

MOST = 1_000_000
"""Ranks of one group that are believed."""


def groups_file(socket: str) -> str:
    """JSON {name: {"name", "desc", "runs"}} of the rank that listens on `socket`."""
    return f"{socket}.groups"


def encode_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks in ascending order as runs [first, last, step]: ten thousand of them in a few bytes."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found


def decode_runs(encoded: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks that `runs` was given; equal ones are one object, for ten thousand ranks name the same groups.

    Raises ValueError when it is no list of runs, or one of more than `MOST` ranks.
    """
    return _decode_runs(tuple(tuple(run) for run in encoded))


@lru_cache(maxsize=8192)
def _decode_runs(encoded: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    ranges = [range(first, last + 1, max(1, step)) for first, last, step in encoded]
    if sum(map(len, ranges)) > MOST:
        raise ValueError(f"a group of more than {MOST:,} ranks")
    return tuple(rank for one in ranges for rank in one)
