"""Detects unfit nodes from measurements that all ranks take before their first step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.messages.agents import RankSpeeds
from trainer.protocol.messages.ranks import Speeds
from trainer.protocol.run_dir import RunDir

_WORDS = {"matmul": "matrix multiplication", "memory": "memory bandwidth"}
_FEWEST = 3
"""Minimum number of nodes for comparing one with the others."""
_EARLIER = 8
"""Maximum number of earlier attempts examined."""
_READ = 1 << 20
"""Bytes read from each attempt's events; measurements are near the beginning."""
_AGREE = 2
"""Minimum number of earlier measurements, close to each other, that define the usual speed."""


class NodeBenchmark:
    """Benchmark of all nodes. `nodes` names each rank's node; `machines` maps nodes to machines, if known."""

    def __init__(self, nodes: Sequence[str], machines: Mapping[str, str], config: PreflightConfig) -> None:
        self._nodes, self._config = nodes, config
        self._first: float | None = None
        self._over = False
        known = [machines.get(node, "") for node in dict.fromkeys(nodes)]
        # Nodes on one machine compete for its cores, so their speeds are not comparable.
        self._comparable = all(known) and len(set(known)) == len(known)
        self._measured: dict[int, Speeds] = {}

    def add(self, message: RankSpeeds, now: float) -> None:
        """Add one rank's measurements. Raises ValueError if they are invalid."""
        speeds = message.speeds
        if not all(value > 0 for value in (speeds.matmul, speeds.memory, *(seconds for _, seconds in speeds.pairs))):
            raise ValueError("measurements must be positive")
        if not 0 <= message.rank < len(self._nodes):
            raise ValueError(f"no such rank: {message.rank}")
        if not self._over:
            self._first = now if self._first is None else self._first
            self._measured[message.rank] = speeds

    def end_trial(self, now: float) -> bool:
        """End the trial if every rank has been measured or the rest are overdue, and return whether it ends now.
        The time limit starts when the first measurement arrives.
        """
        overdue = self._first is not None and now - self._first > self._config.seconds
        if self._over or not (overdue or len(self._measured) == len(self._nodes)):
            return False
        self._over = True
        return True

    def missing(self) -> list[int]:
        return [rank for rank in range(len(self._nodes)) if rank not in self._measured]

    def median_speeds(self) -> dict[str, float]:
        """Return the median over the nodes, which later attempts of this run use as reference."""
        by_node = self._speeds_by_node().values()
        return {name: median(node[name] for node in by_node) for name in _WORDS} if by_node else {}

    def failure(self, history: Mapping[str, float] | None = None) -> Failure | None:
        """Return the failure of the node to blame, slowest first, or None if all are fit or no node can be blamed.
        `history` holds the usual speed for each measurement, for nodes of the same kind.
        """
        return (self._slow_node(history or {}) or self._badly_connected_node()) if self._comparable else None

    def _speeds_by_node(self) -> dict[str, dict[str, float]]:
        """Return the speed of each node's slowest rank, keyed by node and measurement."""
        found: dict[str, dict[str, float]] = {}
        for rank, speeds in self._measured.items():
            node = found.setdefault(self._nodes[rank], {})
            for name in _WORDS:
                node[name] = min(node.get(name, float("inf")), getattr(speeds, name))
        return found

    def _slow_node(self, history: Mapping[str, float]) -> Failure | None:
        found, by_node = [], self._speeds_by_node()
        for node, own in by_node.items():
            for name, speed in own.items():
                others = [each[name] for other, each in by_node.items() if other != node]
                usual = {}
                if len(others) >= _FEWEST - 1:
                    usual[f"the median of the {len(others)} others"] = median(others)
                if name in history:
                    usual["the median of earlier attempts"] = history[name]
                for whose, normal in usual.items():
                    found.append((speed / normal, node, f"{_WORDS[name]} at {speed / normal:.2f} x {whose}"))
        share, node, words = min(found, default=(1.0, "", ""))
        if share >= self._config.slowest:
            return None
        return _suspect(node, f"{words}, below detection.preflight.slowest={self._config.slowest:g}")

    def _badly_connected_node(self) -> Failure | None:
        """Return the failure of a node that was slow with every partner while its partners were fast with others."""
        seconds: dict[frozenset[str], float] = {}
        for rank, speeds in self._measured.items():
            for peer, took in speeds.pairs:
                pair = frozenset((self._nodes[rank], self._nodes[peer]))
                if len(pair) == 2:
                    seconds[pair] = max(seconds.get(pair, 0.0), took)
        nodes = sorted({node for pair in seconds for node in pair})
        if len(nodes) < _FEWEST:
            return None
        # In a small ring one bad node affects half the pairs or more, so the fastest third defines the usual speed.
        usual = sorted(seconds.values())[(len(seconds) - 1) // 3]
        bad = {pair for pair, took in seconds.items() if took * self._config.slowest > usual}
        own = {node: {pair for pair in seconds if node in pair} for node in nodes}
        for node in sorted(nodes, key=lambda node: -max(seconds[pair] for pair in own[node])):
            partners = {other: pair for pair in own[node] for other in pair - {node}}
            if own[node] <= bad and all(own[other] - bad for other in partners):
                times = ", ".join(f"{seconds[pair]:.3f} s with {other}" for other, pair in sorted(partners.items()))
                return _suspect(node, f"exchanges data slowly with every partner: {times}; {usual:.3f} s is usual")
        return None


def _suspect(node: str, reason: str) -> Failure:
    return Failure(kind=FailureKind.NODE_SUSPECT, reason=f"{node}: {reason}", node=node)


def usual_speeds(run: RunDir, attempt: int, config: PreflightConfig) -> dict[str, float]:
    """Return the median speeds of this run's earlier attempts, omitting measurements that disagree. Reads files.
    Measurements further apart than the slow-node limit come from different machines or under a different load.
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
    """Yield the speeds of one attempt's first trial, or nothing if they cannot be read."""
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
