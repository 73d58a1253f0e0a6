"""The interval that holds a median."""

import math


def interval(ordered: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics, equally far from both ends, between which the median is in 95 of 100."""
    count, outside, place = len(ordered), 0.0, 0
    while place < count // 2:
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 0.05:
            break
        place += 1
    first = max(0, place - 1)
    return ordered[first], ordered[count - 1 - first]
