"""Detection of a hang in one generation, and the collection of its evidence.

Nothing is decided here: `hangs.judge` finds the verdict, and `in_job_policy.decide` what follows from it.
"""

from dataclasses import dataclass, field

from trainer.agent.flight.analysis import Finding, analyse
from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.nodes.roster import Roster
from trainer.agent.watch.hang_limits import HALTED, Limits, RankSample
from trainer.agent.watch.hangs import LONGEST, Judgement, ReportGaps, Verdict, judge
from trainer.agent.watch.sampling import JobSnapshot
from trainer.agent.watch.stragglers import StageNeighbours, never_sent, with_stage_waits
from trainer.contract.config_sections.fault_detection_config import HangConfig
from trainer.contract.messages.agents import (
    CollectEvidence,
    EvidenceCollected,
    FlightRecords,
    ProgressReport,
    QueryFlights,
    ReportOften,
)

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


QUIET_SECONDS = 1.0
"""Seconds without any movement before anything is judged: most steps are shorter."""
_ANSWER_SECONDS, _NODES_A_SECOND = 2.0, 300.0
"""How long agents may take to fetch their ranks' flight records, and how many nodes are handled in a second."""
_QUERY_AGAIN_SECONDS = 4.0
"""Seconds between two queries; `hangs.FRESH` says how old an answer may be."""
_LOCK_HELD_SECONDS = 3.0
"""Seconds without Python's lock that are no accident."""
_HEALTHY_RANKS = 2
_MAX_FULL_EVIDENCE = 16
"""Culprits whose full evidence is kept."""


@dataclass(kw_only=True)
class _FlightQuery:
    """Flight records that were asked for at `asked`; `waits`: nodes that have not answered."""

    serial: int
    asked: float
    seconds: float  # how long answers are waited for
    waits: set[int]
    flights: dict[int, FlightRecord] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    finding: Finding | None = None

    def over(self, now: float) -> bool:
        return not self.waits or now - self.asked >= self.seconds

    def age(self, now: float) -> float:
        """Of the answers, without the time that those of many nodes take: they would be old before all are there."""
        return max(0.0, now - self.asked - (self.seconds - _ANSWER_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What was found: evidence is being collected until `until`, from the nodes in `waits`."""

    name: str
    judgement: Judgement
    began: float  # when it was declared, on the coordinator's clock
    quiet: float  # for how long no rank had moved by then
    until: float
    waits: set[int]
    missing: dict[str, dict[str, str]] = field(default_factory=dict)


class HangDetector:
    """For one generation; all times are on the coordinator's monotonic clock."""

    def __init__(
        self, config: HangConfig, roster: Roster, generation: int, started: float, *, world: int, seen: bool = True,
        on_gpus: bool = False, stages: StageNeighbours | None = None,
    ) -> None:  # fmt: skip
        """`seen` is False when the ranks' steps are not known: nothing is judged then.

        `stages`: where ranks send messages of which there are no records.
        """
        self._config, self._roster, self._generation = config, roster, generation
        self._on, self._on_gpus, self._stages = config.on and seen, on_gpus, stages
        self.snapshot = JobSnapshot(started, world)
        self._query: _FlightQuery | None = None
        self._serial = self._incidents = 0
        calm, close = calm_seconds(len(roster.members)), report_seconds(len(roster.members))
        self._report_gaps = ReportGaps(max(LONGEST, 3 * calm), max(LONGEST, 3 * close))
        self._sparse, self._attended = calm > close, float("-inf")  # and when agents were asked for more reports
        self._halted: dict[int, float] = {}  # since when a rank's process has been seen halted
        self.incident: Incident | None = None

    # -- what is heard

    def add_report(self, node: int, report: ProgressReport, now: float) -> None:
        """An agent's report; raises ValueError when it tells what cannot be."""
        if now - self._attended > ATTENTION_SECONDS:
            self._report_gaps.ask(None)
        self._report_gaps.add_report(self._roster.members[node].name, now)
        self.snapshot.add_report(report, self._roster.members[node].name, now)

    def add_flight_records(self, node: int, message: FlightRecords) -> None:
        """An agent's answer to `QueryFlights`; raises what a malformed record raises."""
        query = self._query
        if query is None or message.serial != query.serial:
            return
        for text in message.flights:
            flight = FlightRecord.from_json(text)
            query.flights[flight.rank] = flight
        query.unanswered.update(message.unanswered)
        if message.last:
            query.waits.discard(node)

    def evidence_collected(self, node: int, message: EvidenceCollected) -> None:
        """An agent has written its part of the evidence, as far as it could."""
        if self.incident is not None and message.incident == self.incident.name:
            self.incident.waits.discard(node)
            if message.missing:
                self.incident.missing[self._roster.members[node].name] = message.missing

    # -- what follows

    def look(self, now: float) -> Incident | None:
        """Judge, and do what the judgement calls for; an Incident once its evidence is complete or late."""
        if self.incident is not None:
            return self.incident if not self.incident.waits or now >= self.incident.until else None
        quiet = now - self.snapshot.moved
        if not self._on or quiet < QUIET_SECONDS or not len(self.snapshot):
            return None
        limits = Limits(self._config, self.snapshot.p99())
        if quiet >= limits.look_after / 2:
            self._attend(now)
        # Before that nobody is judged but a halted process, and to go through ten thousand ranks takes a while.
        if quiet < limits.look_after and not self.snapshot.halted:
            self._halted.clear()
            return None
        seen = self.snapshot.at(now)
        judgement = self._judge(seen, limits, now)
        if judgement.verdict is Verdict.LOOK:
            self._query_flights(now)
        elif judgement.verdict is Verdict.HUNG:
            self._declare(judgement, seen, now)
        return None

    def _attend(self, now: float) -> None:
        """Agents of a large job report rarely: ask for more, well before anything is judged."""
        if self._sparse and now - self._attended > ATTENTION_SECONDS / 2:
            if now - self._attended > ATTENTION_SECONDS:
                self._report_gaps.ask(now)
            self._attended = now
            self._roster.broadcast(ReportOften(seconds=ATTENTION_SECONDS))

    def moved_since(self, incident: Incident) -> bool:
        """Whether some rank moved after the incident was declared: then it was none."""
        return self.snapshot.moved > incident.began

    def withdraw(self) -> None:
        """The ranks move again: nothing is killed, and detection goes on."""
        self.incident = self._query = None

    def _judge(self, seen: list[RankSample], limits: Limits, now: float) -> Judgement:
        locked = frozenset(one.rank for one in seen if one.lock > _LOCK_HELD_SECONDS and one.state not in "TtDZX")
        self._halted = {rank: since for rank, since in self._halted.items() if since > self.snapshot.moved}
        for one in seen:
            if one.state in HALTED and not one.ended:
                self._halted.setdefault(one.rank, now)
            else:
                self._halted.pop(one.rank, None)
        query = self._query
        return judge(
            seen,
            self._finding(seen, now),
            limits,
            lock_held=locked,
            found=query.age(now) if query is not None else 0.0,
            halted_for={rank: now - since for rank, since in self._halted.items()},
            report_gaps=self._report_gaps.at(now),
            on_gpus=self._on_gpus,
        )

    def _finding(self, seen: list[RankSample], now: float) -> Finding | None:
        query = self._query
        if query is None or not query.over(now) or query.asked < self.snapshot.moved:
            return None
        if query.finding is None:
            query.finding = self._analysed(query, seen)
        return query.finding

    def _analysed(self, query: _FlightQuery, seen: list[RankSample]) -> Finding:
        # Ranks of a node that has not answered would look like ranks that never entered the collective.
        if query.waits:
            return Finding(kind="none", reason=f"{len(query.waits)} nodes have not sent their ranks' flight records")
        expected = [one.rank for one in seen if not one.ended]
        unanswered = sorted(query.unanswered)
        # On GPUs hosts run ahead of what they wait for, and the records hold messages.
        if self._stages is None or self._on_gpus:
            return analyse(list(query.flights.values()), expected, unanswered)
        flights = with_stage_waits(query.flights, seen, self._stages)
        return analyse(flights, expected, unanswered, never_sent(seen, self._stages))

    def _query_flights(self, now: float) -> None:
        query = self._query
        if query is not None and now - query.asked < _QUERY_AGAIN_SECONDS:
            return
        # Of thousands of nodes answers take longer than that: whoever asks again meanwhile never has them all.
        if query is not None and not query.over(now) and query.asked >= self.snapshot.moved:
            return
        self._serial += 1
        waits = {member.node for member in self._roster.training_members()}
        seconds = max(_ANSWER_SECONDS, len(waits) / _NODES_A_SECOND)
        self._query = _FlightQuery(serial=self._serial, asked=now, seconds=seconds, waits=waits)
        self._roster.broadcast(
            QueryFlights(generation=self._generation, serial=self._serial, seconds=_ANSWER_SECONDS * 0.75)
        )

    def _declare(self, judgement: Judgement, seen: list[RankSample], now: float) -> None:
        self._incidents += 1
        # A name of its own: files of a withdrawn incident do not belong to this one.
        again = f"-{self._incidents}" if self._incidents > 1 else ""
        name = f"g{self._generation:03d}-{judgement.kind}{again}"
        waits = {member.node for member in self._roster.training_members()}
        self.incident = Incident(
            name=name, judgement=judgement, began=now, quiet=now - self.snapshot.moved,
            until=now + self._config.evidence, waits=waits,
        )  # fmt: skip
        named = dict.fromkeys([judgement.culprit, *(one.rank for one in judgement.culprits[:_MAX_FULL_EVIDENCE])])
        full = tuple(rank for rank in (*named, *_comparison_ranks(judgement, seen)) if rank is not None)
        seconds = self._config.evidence * 0.9
        self._roster.broadcast(CollectEvidence(generation=self._generation, incident=name, full=full, seconds=seconds))


def _comparison_ranks(judgement: Judgement, seen: list[RankSample]) -> list[int]:
    """A few waiting ranks to compare with, of another node than the culprit's where there is one."""
    wanted = set(judgement.waiting)
    waiting = [one for one in seen if one.rank in wanted]
    waiting.sort(key=lambda one: one.node == judgement.node)
    return [one.rank for one in waiting[:_HEALTHY_RANKS]]
