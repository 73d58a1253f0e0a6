"""Durations counted in buckets: small enough for a page of shared memory, good enough for a 99th percentile."""

import math
from collections.abc import Iterable, Sequence

BUCKETS = 40
_SHORTEST = 0.001
_GROWTH = math.sqrt(2.0)
_SCALE = 1.0 / math.log(_GROWTH)


def bucket(seconds: float) -> int:
    """The bucket of a duration: the first one ends at 1 ms, each further one lasts 1.41 times longer, to 740 s."""
    if seconds <= _SHORTEST:
        return 0
    return min(BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) * _SCALE - 1e-9))


def longest(index: int) -> float:
    """Seconds at which a bucket ends; the last one has no end, and is given this one."""
    return _SHORTEST * _GROWTH**index


def quantile(counts: Sequence[int], share: float) -> float:
    """Seconds that at least this share of the durations did not exceed, at most 1.41 times too large; 0 of none."""
    total = sum(counts)
    if not total:
        return 0.0
    wanted, seen = math.ceil(share * total), 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return longest(index)
    raise AssertionError("the counts do not add up to their sum")


def sum_counts(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The counts of several ranks together."""
    return tuple(map(sum, zip(*rows, strict=True)))
