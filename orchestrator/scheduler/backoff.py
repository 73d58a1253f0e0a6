"""Pauses between repetitions of what had no effect."""

from collections.abc import Callable


class Backoff:
    """Pauses of effects, by key: `first` seconds before the first repetition, then doubled up to `longest`."""

    def __init__(self, mono: Callable[[], float], *, first: float = 5.0, longest: float = 60.0) -> None:
        self._first, self._longest, self._mono = first, longest, mono
        self._resting: dict[str, tuple[float, float]] = {}  # since when, and for how many seconds

    def is_due(self, key: str) -> bool:
        since, seconds = self._resting.get(key, (0.0, 0.0))
        return not 0.0 <= self._mono() - since < seconds

    def start(self, key: str) -> None:
        """The effect was just tried. A key that was left alone for long starts afresh: job ids are given out again."""
        now = self._mono()
        kept = {key: rest for key, rest in self._resting.items() if now - rest[0] < rest[1] + self._longest}
        seconds = min(self._longest, 2 * kept[key][1]) if key in kept else self._first
        self._resting = {**kept, key: (now, seconds)}

    def forget(self, key: str) -> None:
        self._resting.pop(key, None)
