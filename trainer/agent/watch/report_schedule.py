"""PURE: when an agent reports, so that the coordinator of a large job is not kept busy by ranks that move."""

_REPORTS_A_SECOND = 1000.0
"""What a coordinator hears at most, from the agents of all nodes, while it looks closely."""
_CALM_REPORTS_A_SECOND = 250.0
_LEAST, _MOST_CALM = 0.5, 5.0

ATTENTION_SECONDS = 10.0
"""For how long agents report more often once they were asked to."""


def report_seconds(nodes: int) -> float:
    """Seconds between two reports of an agent while its ranks are looked at closely."""
    return max(_LEAST, nodes / _REPORTS_A_SECOND)


def calm_seconds(nodes: int) -> float:
    """Seconds between two reports of an agent otherwise; the same as `report_seconds` in a job of few nodes."""
    return max(report_seconds(nodes), min(_MOST_CALM, nodes / _CALM_REPORTS_A_SECOND))


class ReportSchedule:
    """Of one agent. Its regular reports have their own place among those of the other nodes, whatever comes between:
    of so many nodes some report at any moment, and the coordinator soon hears that ranks move.
    """

    def __init__(self, node: int, nodes: int, now: float) -> None:
        self._close, self._calm = report_seconds(nodes), calm_seconds(nodes)
        self._regular = now + self._calm * (node + 1) / nodes
        self._last, self._attends_until = now, now

    def attend(self, seconds: float, now: float) -> None:
        """Report more often for so long: the coordinator may have to judge."""
        self._attends_until = max(self._attends_until, now + seconds)

    def due(self, now: float, *, closely: bool = False, at_once: bool = False) -> bool:
        """Whether to report now; `closely`: this node has something to show."""
        regular = now >= self._regular
        if regular:
            self._regular += self._calm * ((now - self._regular) // self._calm + 1)
        close = (closely or now < self._attends_until) and now - self._last >= self._close
        if not (regular or close or at_once):
            return False
        self._last = now
        return True
