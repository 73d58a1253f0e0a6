"""Sides of a comparison measured in turn, so that a slow moment of the machine hits them all."""

import statistics
from collections.abc import Callable, Mapping

LIMIT, OURS = "limit", "ours"
"""A limit that can be reached in several ways has several sides: `limit`, `limit, two threads`; the best counts."""

Side = Callable[[], float]
"""Does its task once and returns its seconds; what is not part of the task is not in them."""


def interleaved(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """The median of each side over `rounds`, after one that does not count; of several limits the fastest is `limit`.

    Limits, ours, limits (A/B/A), then the peers; every second round runs in the opposite order.
    """
    limits = [name for name in sides if name.startswith(LIMIT)]
    order = [*limits, OURS, *limits, *(name for name in sides if name not in (*limits, OURS))]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            times[name].append(sides[name]())
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, LIMIT: min(medians[name] for name in limits)}


def peers(medians: Mapping[str, float]) -> dict[str, float]:
    """Everybody but us and the limits."""
    return {name: value for name, value in medians.items() if name != OURS and not name.startswith(LIMIT)}
