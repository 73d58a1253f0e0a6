"""The ranks' first measurements of a generation: gathered until all are there, then held against each other once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from trainer.agent.nodes.slow_nodes import RankMeasurement, find_slow_node, median_speeds_of_nodes
from trainer.contract.config_sections.fault_detection_config import PreflightConfig
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import Failure
from trainer.contract.messages.agents import RankSpeeds
from trainer.contract.run_dir import RunDir

_EARLIER = 8
"""Attempts before this one that are looked at."""
_READ = 1 << 20
"""Bytes of each one's events: what was measured stands at their beginning."""
_AGREE = 2
"""So many earlier figures, close to each other, make a usual one."""


class NodeBenchmark:
    """`nodes` names each rank's node, `machines` says on which machine each of these is, where that is known."""

    def __init__(self, nodes: Sequence[str], machines: Mapping[str, str], config: PreflightConfig) -> None:
        self._nodes, self._config = nodes, config
        self._first: float | None = None
        self._over = False
        known = [machines.get(node, "") for node in dict.fromkeys(nodes)]
        # Nodes that share a machine take its cores from one another: their speeds say nothing.
        self._comparable = all(known) and len(set(known)) == len(known)
        self._measured: dict[int, RankMeasurement] = {}

    def add(self, message: RankSpeeds, now: float) -> bool:
        """One rank's figures; True when they complete the trial. Raises ValueError."""
        one = RankMeasurement.of(message)
        if not 0 <= one.rank < len(self._nodes):
            raise ValueError(f"there is no rank {one.rank}")
        if self._over:
            return False
        self._first = now if self._first is None else self._first
        self._measured[one.rank] = one
        self._over = len(self._measured) == len(self._nodes)
        return self._over

    def timed_out(self, now: float) -> bool:
        """True once: the ranks whose figures are missing had their time since the first ones came."""
        if self._over or self._first is None or now - self._first <= self._config.seconds:
            return False
        self._over = True
        return True

    def missing(self) -> list[int]:
        """Ranks that have reported nothing."""
        return [rank for rank in range(len(self._nodes)) if rank not in self._measured]

    def failure(self, history: Mapping[str, float] | None = None) -> Failure | None:
        """The node to blame, if there is one; `history` as `usual` gives it."""
        measured = list(self._measured.values())
        return find_slow_node(measured, self._nodes, self._config, history) if self._comparable else None

    def median_speeds(self) -> dict[str, float]:
        """The median node's speeds, for the record."""
        return median_speeds_of_nodes(self._measured.values(), self._nodes)


def usual_speeds(run: RunDir, attempt: int, config: PreflightConfig) -> dict[str, float]:
    """The median of what this run's earlier attempts have measured; nothing where they do not agree. Reads files.

    Figures that are further apart than a slow node is come of different machines, or of what else ran there.
    """
    earlier = [
        speeds for number in range(max(1, attempt - _EARLIER), attempt) for speeds in _recorded_speeds(run, number)
    ]
    found = {}
    for name in {name for speeds in earlier for name in speeds}:
        values = [speeds[name] for speeds in earlier if name in speeds]
        if len(values) >= _AGREE and min(values) >= config.slowest * max(values):
            found[name] = median(values)
    return found


def _recorded_speeds(run: RunDir, attempt: int) -> Iterator[dict[str, float]]:
    """The speeds of one attempt's first trial; none when they cannot be read."""
    try:
        with run.attempt(attempt).event_file("coordinator").open("rb") as stream:
            lines = stream.read(_READ).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
            if event["kind"] == EventKind.PREFLIGHT and event["data"].get("speeds"):
                speeds = {str(name): float(speed) for name, speed in event["data"]["speeds"].items()}
                yield {name: speed for name, speed in speeds.items() if 0 < speed < float("inf")}
                return
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
