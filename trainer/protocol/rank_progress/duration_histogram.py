"""Histograms of durations: small enough for a page of shared memory, precise enough for a 99th percentile."""

import math
from collections.abc import Iterable, Sequence

BUCKETS = 40
_SHORTEST = 0.001
_GROWTH = math.sqrt(2.0)
_SCALE = 1.0 / math.log(_GROWTH)


def bucket(seconds: float) -> int:
    """Return the bucket of a duration: the first ends at 1 ms, each further one is 1.41 times longer, up to 740 s."""
    if seconds <= _SHORTEST:
        return 0
    return min(BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) * _SCALE - 1e-9))


def longest(index: int) -> float:
    """Return the seconds at which a bucket ends; the last one has no end and gets this value."""
    return _SHORTEST * _GROWTH**index


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the quantile in seconds, at most 1.41 times too large; 0 without durations."""
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
    """Return the summed counts of several ranks."""
    return tuple(map(sum, zip(*rows, strict=True)))
