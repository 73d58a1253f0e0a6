"""Detection of a hang in one generation, and the collection of its evidence.
Makes no decisions: `hangs.judge` gives the verdict, and `in_job_policy.decide` the consequence.
"""

from dataclasses import dataclass, field

from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.nodes.roster import Roster
from trainer.agent.watch.hang_limits import (
    ATTENTION_SECONDS,
    HALTED,
    LONGEST,
    Limits,
    RankSample,
    ReportGaps,
    calm_seconds,
    report_seconds,
)
from trainer.agent.watch.hangs import HangJudgement, HangVerdict, judge
from trainer.agent.watch.sampling import JobSnapshot
from trainer.agent.watch.stage_waits import StageNeighbours, never_sent, with_stage_waits
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages.agents import (
    CollectEvidence,
    EvidenceCollected,
    FlightRecords,
    ProgressReport,
    QueryFlights,
    ReportOften,
)

QUIET_SECONDS = 1.0
"""Seconds without any movement before a judgement; most steps are shorter."""
_ANSWER_SECONDS, _NODES_A_SECOND = 2.0, 300.0
"""Time limit for agents to fetch their ranks' flight records, and nodes handled per second."""
_QUERY_AGAIN_SECONDS = 4.0
"""Seconds between two queries; `hangs.FRESH` is the maximum age of an answer."""
_LOCK_HELD_SECONDS = 3.0
"""Seconds without Python's lock beyond which a rank is suspect."""
_HEALTHY_RANKS = 2
_MAX_FULL_EVIDENCE = 16
"""Maximum number of culprits with full evidence."""


@dataclass(kw_only=True)
class _FlightQuery:
    """Flight records requested at `asked`; `waits`: nodes that have not answered."""

    serial: int
    asked: float
    seconds: float  # time limit of the answers
    waits: set[int]
    flights: dict[int, FlightRecord] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    finding: Finding | None = None

    def is_over(self, now: float) -> bool:
        return not self.waits or now - self.asked >= self.seconds

    def age(self, now: float) -> float:
        """Return the age of the answers, less the extra time for many nodes: they would be stale before all arrive."""
        return max(0.0, now - self.asked - (self.seconds - _ANSWER_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A declared hang whose evidence is collected until `until`, from the nodes in `waits`."""

    name: str
    judgement: HangJudgement
    began: float  # time of declaration, on the coordinator's clock
    quiet: float  # seconds without movement of any rank before it
    until: float
    waits: set[int]
    missing: dict[str, dict[str, str]] = field(default_factory=dict)


class HangDetector:
    """Hang detection for one generation; times are on the coordinator's monotonic clock."""

    def __init__(
        self, config: HangConfig, roster: Roster, generation: int, started: float, *, world: int, seen: bool = True,
        on_gpus: bool = False, stages: StageNeighbours | None = None,
    ) -> None:  # fmt: skip
        """`seen` is False if the ranks' steps are unknown; then nothing is judged.
        `stages`: neighbours of ranks whose messages are not recorded.
        """
        self._config, self._roster, self._generation = config, roster, generation
        self._on, self._on_gpus, self._stages = config.on and seen, on_gpus, stages
        self.snapshot = JobSnapshot(started, world)
        self._query: _FlightQuery | None = None
        self._serial = self._incidents = 0
        calm, close = calm_seconds(len(roster.members)), report_seconds(len(roster.members))
        self._report_gaps = ReportGaps(max(LONGEST, 3 * calm), max(LONGEST, 3 * close))
        self._sparse, self._attended = calm > close, float("-inf")  # and the last request for more reports
        self._halted: dict[int, float] = {}  # time since which a rank's process has been seen halted
        self.incident: Incident | None = None

    # -- input

    def add_report(self, node: int, report: ProgressReport, now: float) -> None:
        """Add an agent's report; raises ValueError for impossible values."""
        if now - self._attended > ATTENTION_SECONDS:
            self._report_gaps.ask(None)
        self._report_gaps.add_report(self._roster.members[node].name, now)
        self.snapshot.add_report(report, self._roster.members[node].name, now)

    def add_flight_records(self, node: int, message: FlightRecords) -> None:
        """Add an agent's answer to `QueryFlights`; raises the errors of a malformed record."""
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
        if self.incident is not None and message.incident == self.incident.name:
            self.incident.waits.discard(node)
            if message.missing:
                self.incident.missing[self._roster.members[node].name] = message.missing

    # -- judgement

    def look(self, now: float) -> Incident | None:
        """Judge and act on the judgement; returns an Incident once its evidence is complete or late."""
        if self.incident is not None:
            return self.incident if not self.incident.waits or now >= self.incident.until else None
        quiet = now - self.snapshot.moved
        if not self._on or quiet < QUIET_SECONDS or not len(self.snapshot):
            return None
        limits = Limits(self._config, self.snapshot.p99())
        if quiet >= limits.look_after / 2:
            self._attend(now)
        # Earlier, only halted processes are judged; checking ten thousand ranks takes a while.
        if quiet < limits.look_after and not self.snapshot.halted:
            self._halted.clear()
            return None
        seen = self.snapshot.at(now)
        judgement = self._judge(seen, limits, now)
        if judgement.verdict is HangVerdict.LOOK:
            self._query_flights(now)
        elif judgement.verdict is HangVerdict.HUNG:
            self._declare(judgement, seen, now)
        return None

    def _attend(self, now: float) -> None:
        """Request more frequent reports from a large job's agents, well before any judgement."""
        if self._sparse and now - self._attended > ATTENTION_SECONDS / 2:
            if now - self._attended > ATTENTION_SECONDS:
                self._report_gaps.ask(now)
            self._attended = now
            self._roster.broadcast(ReportOften(seconds=ATTENTION_SECONDS))

    def moved_since(self, incident: Incident) -> bool:
        """Return whether a rank moved after the incident was declared, which refutes it."""
        return self.snapshot.moved > incident.began

    def withdraw(self) -> None:
        """Withdraw the incident: the ranks move again, nothing is killed, and detection continues."""
        self.incident = self._query = None

    def _judge(self, seen: list[RankSample], limits: Limits, now: float) -> HangJudgement:
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
        if query is None or not query.is_over(now) or query.asked < self.snapshot.moved:
            return None
        if query.finding is None:
            query.finding = self._analyse(query, seen)
        return query.finding

    def _analyse(self, query: _FlightQuery, seen: list[RankSample]) -> Finding:
        # Ranks of a node that has not answered would appear never to have entered the collective.
        if query.waits:
            return Finding(kind="none", reason=f"{len(query.waits)} nodes have not sent their ranks' flight records")
        expected = [one.rank for one in seen if not one.ended]
        unanswered = sorted(query.unanswered)
        # On GPUs, hosts run ahead of the operation they wait for, and the records contain messages.
        if self._stages is None or self._on_gpus:
            return analyse(list(query.flights.values()), expected, unanswered)
        flights = with_stage_waits(query.flights, seen, self._stages)
        return analyse(flights, expected, unanswered, never_sent(seen, self._stages))

    def _query_flights(self, now: float) -> None:
        query = self._query
        if query is not None and now - query.asked < _QUERY_AGAIN_SECONDS:
            return
        # Answers of thousands of nodes take longer than that; a new query meanwhile would discard them.
        if query is not None and not query.is_over(now) and query.asked >= self.snapshot.moved:
            return
        self._serial += 1
        waits = {member.node for member in self._roster.training_members()}
        seconds = max(_ANSWER_SECONDS, len(waits) / _NODES_A_SECOND)
        self._query = _FlightQuery(serial=self._serial, asked=now, seconds=seconds, waits=waits)
        self._roster.broadcast(
            QueryFlights(generation=self._generation, serial=self._serial, seconds=_ANSWER_SECONDS * 0.75)
        )

    def _declare(self, judgement: HangJudgement, seen: list[RankSample], now: float) -> None:
        self._incidents += 1
        # Own name: files of a withdrawn incident do not belong to this one.
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


def _comparison_ranks(judgement: HangJudgement, seen: list[RankSample]) -> list[int]:
    """Return a few waiting ranks for comparison, preferably on another node than the culprit's."""
    wanted = set(judgement.waiting)
    waiting = [one for one in seen if one.rank in wanted]
    waiting.sort(key=lambda one: one.node == judgement.node)
    return [one.rank for one in waiting[:_HEALTHY_RANKS]]
