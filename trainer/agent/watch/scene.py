"""What the coordinator knows of all ranks of a generation: agents tell changes, and time makes them older."""

from collections.abc import Mapping
from typing import Any

from trainer.agent.watch.sighting import Sighting


class Scene:
    """The coordinator's picture of one generation: the newest sighting of every rank, made as old as it is."""

    def __init__(self, started: float, world: int) -> None:
        self._world = world
        self._seen: dict[int, tuple[float, Sighting]] = {}
        self.moved = started
        """When any rank moved last, on the coordinator's clock."""
        self._p99: dict[str, dict[str, float]] = {}  # phase -> node -> seconds

    def heard(self, report: Mapping[str, Any], node: str, now: float) -> None:
        """Take in one agent's report; raises TypeError or ValueError when it is none."""
        for row in report.get("sightings", ()):
            sighting = Sighting.from_row(row, node)
            if not 0 <= sighting.rank < self._world:
                raise ValueError(f"there is no rank {sighting.rank}")
            self._seen[sighting.rank] = (now, sighting)
            if not sighting.ended:
                self.moved = max(self.moved, now - sighting.age)
        for phase, seconds in report.get("p99", {}).items():
            self._p99.setdefault(str(phase), {})[node] = float(seconds)

    def at(self, now: float) -> list[Sighting]:
        """Every rank that has been seen, by number."""
        return [_older(sighting, max(0.0, now - heard)) for _, (heard, sighting) in sorted(self._seen.items())]

    def p99(self) -> dict[str, float]:
        """Seconds of each phase's 99th percentile, on the slowest node."""
        return {phase: max(by_node.values()) for phase, by_node in self._p99.items()}

    def __len__(self) -> int:
        return len(self._seen)


def _older(sighting: Sighting, seconds: float) -> Sighting:
    """What is still believed of a rank so long after it was seen."""
    return Sighting(
        rank=sighting.rank, node=sighting.node, step=sighting.step, phase=sighting.phase, first=sighting.first,
        collective=sighting.collective, age=sighting.age + seconds, alive=sighting.alive + seconds,
        state=sighting.state, lock=sighting.lock + seconds if sighting.lock else 0.0, ended=sighting.ended,
    )  # fmt: skip
