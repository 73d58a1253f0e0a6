"""When no reports came from a node: a rank is not judged by time in which it was not sampled."""

from collections import deque
from collections.abc import Mapping, Sequence

from trainer.agent.watch.rank_sample import RankSample

LONGEST = 2.0
"""Seconds between two reports of an agent that are no silence yet."""

_KEPT = 32
"""Silences remembered of a node."""

Gaps = Mapping[str, Sequence[tuple[float, float]]]
"""Of each node the silences: how many seconds ago they began and ended; 0 for one that still lasts."""


class ReportGaps:
    """Gaps between the reports of each node: its machine stood still, or its agent, or the network, or the listener.

    Only what goes beyond `longest` counts, so that a node whose reports are always late can be judged all the same.
    Once agents are asked to report more often, that is `close` seconds: since the question in a gap that is over, whose
    end has told how old everything was; since the last report in one that lasts, for nothing is known of it.
    """

    def __init__(self, longest: float = LONGEST, close: float = LONGEST) -> None:
        self._longest, self._close = longest, close
        self._asked: float | None = None
        self._last_report: dict[str, float] = {}
        self._gaps: dict[str, deque[tuple[float, float]]] = {}

    def ask(self, now: float | None) -> None:
        """From now on agents report more often; None: no longer."""
        self._asked = now

    def add_report(self, node: str, now: float) -> None:
        """A report of this node has come."""
        last = self._last_report.get(node, now)
        since = last + self._longest
        if self._asked is not None:
            since = min(since, max(last, self._asked) + self._close)
        if now > since:
            self._gaps.setdefault(node, deque(maxlen=_KEPT)).append((since, now))
        self._last_report[node] = now

    def at(self, now: float) -> dict[str, list[tuple[float, float]]]:
        """The silences of all nodes that had any."""
        found = {node: [(now - began, now - ended) for began, ended in gaps] for node, gaps in self._gaps.items()}
        longest = self._longest if self._asked is None else self._close
        for node, heard in self._last_report.items():
            since = heard + longest
            if now > since:
                found.setdefault(node, []).append((now - since, 0.0))
        return found


def seconds_still(one: RankSample, report_gaps: Gaps) -> float:
    """Seconds for which this rank is known not to have moved, without the gaps in its node's reports."""
    gaps = report_gaps.get(one.node)
    if not gaps:
        return one.age
    return max(0.0, one.age - sum(max(0.0, min(one.age, began) - ended) for began, ended in gaps))
