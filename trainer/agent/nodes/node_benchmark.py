"""PURE: detection of unfit nodes from the measurements of all ranks before their first step."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.messages.agents import RankSpeeds
from trainer.protocol.run_dir import RunDir

_WORDS = {"matmul": "matrix multiplication", "memory": "memory bandwidth"}
_FEWEST = 3
"""Minimum number of nodes for comparing one with the others."""


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """Measurements of one rank, as speeds: more is better."""

    rank: int
    matmul: float  # floating-point operations per second
    memory: float  # bytes per second
    pairs: tuple[tuple[int, float], ...] = ()  # (rank it exchanged data with, seconds)

    @classmethod
    def from_message(cls, message: RankSpeeds) -> "RankMeasurement":
        """Return a rank's measurements; raises ValueError if any is not positive."""
        one = message.speeds
        if not all(value > 0 for value in (one.matmul, one.memory, *(seconds for _, seconds in one.pairs))):
            raise ValueError("measurements must be positive")
        return cls(rank=message.rank, matmul=one.matmul, memory=one.memory, pairs=one.pairs)


def speeds(measured: Iterable[RankMeasurement], nodes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the speed of each node's slowest rank by node and measurement; `nodes` is each rank's node."""
    found: dict[str, dict[str, float]] = {}
    for one in measured:
        node = found.setdefault(nodes[one.rank], {})
        for name in _WORDS:
            node[name] = min(node.get(name, float("inf")), getattr(one, name))
    return found


def median_speeds_of_nodes(measured: Iterable[RankMeasurement], nodes: Sequence[str]) -> dict[str, float]:
    """Return the median over the nodes, the reference for later attempts of this run."""
    by_node = speeds(measured, nodes).values()
    return {name: median(node[name] for node in by_node) for name in _WORDS} if by_node else {}


def find_slow_node(
    measured: Sequence[RankMeasurement],
    nodes: Sequence[str],
    config: PreflightConfig,
    history: Mapping[str, float] | None = None,
) -> Failure | None:
    """Return the failure of the node to blame, slowest first; None if all are fit or no node can be blamed.
    `history`: usual speeds by measurement, for nodes of the same kind.
    """
    return _slow(speeds(measured, nodes), config, history or {}) or _cut_off(measured, nodes, config)


def _slow(
    by_node: Mapping[str, Mapping[str, float]], config: PreflightConfig, history: Mapping[str, float]
) -> Failure | None:
    found = []
    for node, own in by_node.items():
        for name, speed in own.items():
            others = [each[name] for other, each in by_node.items() if other != node]
            usual = [(median(others), f"the median of the {len(others)} others")] if len(others) >= _FEWEST - 1 else []
            if name in history:
                usual.append((history[name], "the median of earlier attempts"))
            for normal, whose in usual:
                found.append((speed / normal, node, f"{_WORDS[name]} at {speed / normal:.2f} x {whose}"))
    share, node, words = min(found, default=(1.0, "", ""))
    if share >= config.slowest:
        return None
    return _suspect(node, f"{words}, below detection.preflight.slowest={config.slowest:g}")


def _cut_off(measured: Sequence[RankMeasurement], nodes: Sequence[str], config: PreflightConfig) -> Failure | None:
    """Return the failure of a node that was slow with every partner while its partners were fast with others."""
    seconds: dict[frozenset[str], float] = {}
    for one in measured:
        for peer, took in one.pairs:
            pair = frozenset((nodes[one.rank], nodes[peer]))
            if len(pair) == 2:
                seconds[pair] = max(seconds.get(pair, 0.0), took)
    if len({node for pair in seconds for node in pair}) < _FEWEST:
        return None
    # In a small ring one bad node affects half the pairs or more, so the speed that a third of them reach is usual.
    usual = sorted(seconds.values())[(len(seconds) - 1) // 3]
    bad = {pair for pair, took in seconds.items() if took * config.slowest > usual}
    for node in sorted({node for pair in bad for node in pair}, key=lambda node: -_longest(node, seconds)):
        own = [pair for pair in seconds if node in pair]
        if bad.issuperset(own) and all(_well_elsewhere(pair - {node}, own, seconds, bad) for pair in own):
            times = ", ".join(f"{seconds[pair]:.3f} s with {min(pair - {node})}" for pair in own)
            return _suspect(node, f"exchanges data slowly with every partner: {times}; {usual:.3f} s is usual")
    return None


def _longest(node: str, seconds: Mapping[frozenset[str], float]) -> float:
    return max(took for pair, took in seconds.items() if node in pair)


def _well_elsewhere(
    partner: frozenset[str],
    but: Sequence[frozenset[str]],
    seconds: Mapping[frozenset[str], float],
    bad: set[frozenset[str]],
) -> bool:
    return any(partner < pair and pair not in but and pair not in bad for pair in seconds)


def _suspect(node: str, reason: str) -> Failure:
    return Failure(kind=FailureKind.NODE_SUSPECT, reason=f"{node}: {reason}", node=node)


_EARLIER = 8
"""Maximum number of earlier attempts examined."""


_READ = 1 << 20
"""Bytes read from each attempt's events; measurements are near the beginning."""


_AGREE = 2
"""Number of earlier measurements, close to each other, that define the usual speed."""


class NodeBenchmark:
    """Benchmark of all nodes. `nodes` names each rank's node; `machines` maps nodes to machines, if known."""

    def __init__(self, nodes: Sequence[str], machines: Mapping[str, str], config: PreflightConfig) -> None:
        self._nodes, self._config = nodes, config
        self._first: float | None = None
        self._over = False
        known = [machines.get(node, "") for node in dict.fromkeys(nodes)]
        # Nodes on one machine compete for its cores, so their speeds are not comparable.
        self._comparable = all(known) and len(set(known)) == len(known)
        self._measured: dict[int, RankMeasurement] = {}

    def add(self, message: RankSpeeds, now: float) -> bool:
        """Add one rank's measurements; returns True if they complete the trial. Raises ValueError."""
        one = RankMeasurement.from_message(message)
        if not 0 <= one.rank < len(self._nodes):
            raise ValueError(f"no such rank: {one.rank}")
        if self._over:
            return False
        self._first = now if self._first is None else self._first
        self._measured[one.rank] = one
        self._over = len(self._measured) == len(self._nodes)
        return self._over

    def timed_out(self, now: float) -> bool:
        """Return True, once, when measurements are overdue; their time starts when the first one arrives."""
        if self._over or self._first is None or now - self._first <= self._config.seconds:
            return False
        self._over = True
        return True

    def missing(self) -> list[int]:
        return [rank for rank in range(len(self._nodes)) if rank not in self._measured]

    def failure(self, history: Mapping[str, float] | None = None) -> Failure | None:
        """Return the failure of the node to blame, or None; `history` comes from `usual_speeds`."""
        measured = list(self._measured.values())
        return find_slow_node(measured, self._nodes, self._config, history) if self._comparable else None

    def median_speeds(self) -> dict[str, float]:
        return median_speeds_of_nodes(self._measured.values(), self._nodes)


def usual_speeds(run: RunDir, attempt: int, config: PreflightConfig) -> dict[str, float]:
    """Return the median speeds of this run's earlier attempts, omitting measurements that disagree. Reads files.
    Measurements further apart than the slow-node limit come from different machines or other load.
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
    """Yield the speeds of one attempt's first trial; nothing if they cannot be read."""
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
