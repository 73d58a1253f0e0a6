"""Which of the checkpoints that are there a generation does not trust."""

from collections.abc import Iterable


class DistrustedCheckpoints:
    """Refused copies, by the tier that they lie in, and names that a restore has passed over, wherever they lie."""

    def __init__(self) -> None:
        self._refused: set[tuple[str, str]] = set()
        self._passed: frozenset[str] = frozenset()

    def refuse(self, tier: str, name: str) -> None:
        """The copy in this tier (a path, or `memory`) is bad; one elsewhere may be good."""
        self._refused.add((tier, name))

    def pass_over(self, names: Iterable[str]) -> None:
        """What was there and was left out, or is newer than what a restore has chosen."""
        self._passed = frozenset(names)

    def of(self, tier: str) -> frozenset[str]:
        """Names that stand for nothing in this tier, neither as a substitute nor as a source."""
        return self._passed | {name for place, name in self._refused if place == tier}
