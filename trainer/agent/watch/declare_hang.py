"""Declares hangs: judges which rank stopped first, and collects the evidence.

Only the rank that stopped first (`first_to_stop`) is checked against its own limit, so ranks waiting for a peer in a
phase that is slow for good reason are never blamed. `in_job_policy.decide` chooses the response.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from operator import itemgetter

from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.nodes.roster import Roster
from trainer.agent.watch.hang_limits import (
    ATTENTION_SECONDS,
    HALTED,
    LOCK_HELD_SECONDS,
    LONGEST,
    Allowed,
    Gaps,
    Limits,
    RankSample,
    ReportGaps,
    calm_seconds,
    format_seconds,
    report_seconds,
    seconds_still,
)
from trainer.agent.watch.sampling import JobSnapshot
from trainer.agent.watch.waiting_ranks import (
    _HALTS,
    _NOBODY,
    CONFIRMED,
    HangKind,
    StageNeighbours,
    Suspicion,
    _kind,
    first_to_stop,
    never_sent,
    with_stage_waits,
)
from trainer.agent.watch.witnesses import weigh
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.failures.outcome import Culprit
from trainer.protocol.messages.agents import (
    CollectEvidence,
    EvidenceCollected,
    FlightRecords,
    ProgressReport,
    QueryFlights,
    RasRow,
    ReportOften,
)

LOOK_AT_HALTED = 1.0
"""Seconds without movement by any rank after which a halted process is examined."""

FRESH = 5.0
"""Maximum age, in seconds, of flight records that can justify a kill. Older records are requested again."""

AHEAD = 3.0
"""How many seconds before a limit expires to request records again, if they would be too old by then."""

_MAX_ROOTS = 8
"""Maximum number of roots listed in a reason."""
_NO_GAPS: Gaps = {}


class HangVerdict(Enum):
    FINE = auto()
    LOOK = auto()  # query every rank's flight record, then judge again
    HUNG = auto()


@dataclass(frozen=True, kw_only=True)
class HangJudgement:
    """Action and reason; the other fields are set if the verdict is HUNG."""

    verdict: HangVerdict
    reason: str
    culprit: int | None = None
    node: str | None = None
    phase: str = ""
    step: int = 0  # the last step that the culprit finished
    kind: HangKind = HangKind.UNKNOWN
    waiting: tuple[int, ...] = ()
    limit: float = 0.0
    culprits: tuple[Culprit, ...] = ()  # all roots, starting with the one for `culprit`; empty if no rank is named
    chain: str = ""  # path of waits, from the flight records
    witnesses: tuple[str, ...] = ()  # for a user's program: what each witness shows


def judge(
    sightings: Sequence[RankSample],
    finding: Finding | None,
    limits: Limits,
    *,
    lock_held: AbstractSet[int] = frozenset(),
    found: float = 0.0,
    halted_for: Mapping[int, float] = _NOBODY,
    report_gaps: Gaps = _NO_GAPS,
    on_gpus: bool = False,
) -> HangJudgement:
    """Judge one generation.
    `finding` is the analysis of flight records requested `found` seconds ago. `lock_held` lists the ranks whose
    interpreters can run no thread. `halted_for` maps ranks to the seconds they have been seen halted. `report_gaps`
    holds nodes' silences, which do not count against ranks. `on_gpus` means that ranks spin while they wait for a
    collective, so their CPU time does not count as activity.
    """
    live = [one for one in sightings if not one.ended]
    if not live:
        return fine("all ranks have ended")
    mover = min(live, key=lambda one: seconds_still(one, report_gaps))
    quiet = seconds_still(mover, report_gaps)
    if finding is not None and found > quiet:
        finding = None  # a rank has moved since then, so the finding is outdated
    # Usually some rank is moving, and no more information is needed.
    if quiet < LOOK_AT_HALTED:
        return fine(_still_moving(mover, quiet, LOOK_AT_HALTED, report_gaps))
    suspicion = first_to_stop(live, finding, lock_held, on_gpus=on_gpus, halted_for=halted_for)
    due = LOOK_AT_HALTED if suspicion.is_halted else limits.look_after
    if quiet < due:
        return fine(_still_moving(mover, quiet, due, report_gaps))

    def excess(one: RankSample) -> tuple[float, Allowed]:
        """Return by how many seconds the rank exceeds its limit (negative if it does not), and the limit."""
        allowed = limits.for_rank(one, waited_for=len(live) > 1, spins=suspicion.spins)
        return seconds_still(one, report_gaps) - allowed.seconds, allowed

    over, allowed = min(map(excess, suspicion.rivals), key=itemgetter(0))
    if suspicion.is_halted and suspicion.rank is not None:
        over = min(over, halted_for.get(suspicion.rank.rank, CONFIRMED) - CONFIRMED)
    certain = over >= 0 and suspicion.is_halted
    if finding is None and not certain:
        return HangJudgement(verdict=HangVerdict.LOOK, reason=f"no rank has moved for {format_seconds(quiet)}")
    if over < 0:
        if not suspicion.is_halted and over > -AHEAD and found - over > FRESH:
            return HangJudgement(verdict=HangVerdict.LOOK, reason=f"a limit expires in {format_seconds(-over)}")
        return _within(suspicion, allowed, len(live) - 1)
    # A rank may complete many collectives between two writes to its cell.
    if found > FRESH and not certain:
        return HangJudgement(verdict=HangVerdict.LOOK, reason=f"the flight records are {format_seconds(found)} old")
    late = [one for one in suspicion.others if excess(one)[0] >= 0]
    return _hung(replace(suspicion, others=tuple(late)), allowed, live, lock_held)


def with_witnesses(
    judgement: HangJudgement,
    seen: Sequence[RankSample],
    finding: Finding | None,
    ras: Mapping[int, RasRow],
    *,
    most: float,
) -> HangJudgement:
    """Return the judgement on a user's program: a hang only if enough witnesses agree."""
    if judgement.verdict is not HangVerdict.HUNG:
        return judgement
    weighed = weigh(judgement.culprit, seen, finding, ras, most=most)
    if not weighed.enough:
        return fine(f"{judgement.reason}; not declared a hang: {weighed.reason}")
    words = tuple(f"{one.witness}: {one.words}" for one in weighed.testimonies)
    return replace(judgement, reason=f"{judgement.reason}; witnesses: {weighed.reason}", witnesses=words)


def _still_moving(mover: RankSample, quiet: float, due: float, report_gaps: Gaps) -> str:
    lasting = [began for began, ended in report_gaps.get(mover.node, ()) if not ended]
    if lasting:
        return f"{mover.node} has not reported for {format_seconds(lasting[0])}; its ranks may be moving"
    return f"rank {mover.rank} moved {format_seconds(quiet)} ago; no check is due before {format_seconds(due)}"


def fine(reason: str) -> HangJudgement:
    return HangJudgement(verdict=HangVerdict.FINE, reason=reason)


def _within(suspicion: Suspicion, allowed: Allowed, peers: int) -> HangJudgement:
    first = suspicion.rank
    if first is None:
        return fine(f"no rank stopped first: {suspicion.why}; within {allowed.words}")
    who = f"{_rank_label(first)} has been in {_where(first)}, within {allowed.words}"
    return fine(f"{who}; {_waiting(peers)}" if peers else who)


def _hung(
    suspicion: Suspicion, allowed: Allowed, live: Sequence[RankSample], lock_held: AbstractSet[int]
) -> HangJudgement:
    first = suspicion.rank
    named = {one.rank for one in suspicion.others} | ({first.rank} if first is not None else set())
    waiting = tuple(one.rank for one in live if one.rank not in named)
    limit = f"longer than {allowed.words}"
    if first is None:
        return _hung_together(suspicion, allowed, limit, waiting)
    roots = (first, *sorted(suspicion.others, key=lambda one: one.rank))
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=_who_stopped(roots, suspicion.why, limit, len(waiting)),
        culprit=first.rank,
        node=first.node,
        phase=first.phase,
        step=first.step,
        kind=suspicion.kind,
        waiting=waiting,
        limit=allowed.seconds,
        culprits=tuple(_culprit(one, suspicion, lock_held) for one in roots),
        chain=suspicion.chain,
    )


def _culprit(one: RankSample, suspicion: Suspicion, lock_held: AbstractSet[int]) -> Culprit:
    kind = suspicion.kind
    if one is not suspicion.rank and kind is not HangKind.DESYNC:
        kind = _HALTS[one.state][0] if suspicion.is_halted else kind if suspicion.spins else _kind(one, lock_held)
    return Culprit(rank=one.rank, node=one.node, kind=str(kind), reason=f"it has been in {_where(one)}")


def _who_stopped(roots: Sequence[RankSample], why: str, limit: str, waiting: int) -> str:
    if len(roots) == 1:
        where = f"it has been in {_where(roots[0])}, {limit}"
        return f"{_rank_label(roots[0])} stopped first: {where}; {_waiting(waiting)}; {why}"
    who = ", ".join(f"{_rank_label(one)} in {_where(one)}" for one in roots[:_MAX_ROOTS])
    more = f" and {len(roots) - _MAX_ROOTS} more" if len(roots) > _MAX_ROOTS else ""
    return f"{len(roots)} ranks stopped independently: {who}{more}, {limit}; {_waiting(waiting, 'them')}; {why}"


def _hung_together(suspicion: Suspicion, allowed: Allowed, limit: str, waiting: tuple[int, ...]) -> HangJudgement:
    """Return the judgement for ranks that have all joined but make no progress.
    No rank is blamed, and a node only if it is the only one.
    """
    joined = suspicion.rivals
    nodes = sorted({one.node for one in joined})
    oldest = max(joined, key=lambda one: one.age)
    places = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    what = f"the network between {places} is suspect" if len(nodes) > 1 else f"all of these ranks are on {places}"
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=f"no rank stopped first: {suspicion.why}; "
        f"no rank has made progress for {format_seconds(oldest.age)}, {limit}; {what}",
        node=nodes[0] if len(nodes) == 1 else None,
        phase=oldest.phase,
        step=oldest.step,
        kind=suspicion.kind,
        waiting=waiting,
        limit=allowed.seconds,
    )


def _rank_label(one: RankSample) -> str:
    return f"rank {one.rank} on {one.node}"


def _waiting(peers: int, whom: str = "it") -> str:
    return f"1 rank waits for {whom}" if peers == 1 else f"{peers or 'no'} ranks wait for {whom}"


def _where(one: RankSample) -> str:
    """Describe the rank's phase, the last step it finished, and how long it has been at that point."""
    after = "before the end of its first step" if one.first else f"after step {one.step}"
    doing = "" if one.moment is None else f" ({one.moment})"
    return f"{one.phase}{doing} {after} for {format_seconds(one.age)}"


QUIET_SECONDS = 1.0
"""Seconds without any movement before ranks are judged; most steps are shorter."""
_ANSWER_SECONDS, _NODES_A_SECOND = 2.0, 300.0
"""Time limit for agents to fetch their ranks' flight records, and nodes handled per second."""
_QUERY_AGAIN_SECONDS = 4.0
"""Seconds between two queries; answers older than `FRESH` are not used."""
_HEALTHY_RANKS = 2
_MAX_FULL_EVIDENCE = 16
"""Maximum number of culprits with full evidence."""


@dataclass(kw_only=True)
class _FlightQuery:
    """Flight records requested at `asked`. `waits` holds the nodes that have not answered."""

    serial: int
    asked: float
    seconds: float  # time limit for the answers
    waits: set[int]
    flights: dict[int, FlightRecord] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    ras: dict[int, RasRow] = field(default_factory=dict)
    finding: Finding | None = None

    def is_over(self, now: float) -> bool:
        return not self.waits or now - self.asked >= self.seconds

    def age(self, now: float) -> float:
        """Return the answers' age, less the extra time for many nodes.
        Without that, early answers would be stale too soon.
        """
        return max(0.0, now - self.asked - (self.seconds - _ANSWER_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A declared hang whose evidence is collected until `until`, from the nodes in `waits`."""

    name: str
    judgement: HangJudgement
    began: float  # time of declaration, on the coordinator's clock
    quiet: float  # seconds without movement by any rank before the declaration
    until: float
    waits: set[int]
    missing: dict[str, dict[str, str]] = field(default_factory=dict)


class HangDetector:
    """Hang detection for one generation; times are on the coordinator's monotonic clock."""

    def __init__(
        self, config: HangConfig, roster: Roster, generation: int, started: float, *, world: int,
        program: bool = False, on_gpus: bool = False, stages: StageNeighbours | None = None,
    ) -> None:  # fmt: skip
        """`program` means that the ranks run a user's program, so that a verdict needs two witnesses.
        `stages` holds the neighbours of ranks whose messages are not recorded.
        """
        self._config, self._roster, self._generation = config, roster, generation
        self._on, self._on_gpus, self._stages, self._program = config.on, on_gpus, stages, program
        self.snapshot = JobSnapshot(started, world)
        self._query: _FlightQuery | None = None
        self._serial = self._incidents = 0
        calm, close = calm_seconds(len(roster.members)), report_seconds(len(roster.members))
        self._report_gaps = ReportGaps(max(LONGEST, 3 * calm), max(LONGEST, 3 * close))
        self._sparse, self._attended = calm > close, float("-inf")  # _attended: last request for more reports
        self._observed = float("-inf")  # declaration of the newest incident that was only reported
        self._halted: dict[int, float] = {}  # since when a rank's process has been seen halted
        self._suspended = float("inf")  # since when all ranks have been seen stopped
        self.incident: Incident | None = None

    # -- input

    def add_report(self, node: int, report: ProgressReport, now: float) -> None:
        """Add an agent's report. Raises ValueError for impossible values."""
        if now - self._attended > ATTENTION_SECONDS:
            self._report_gaps.ask(None)
        self._report_gaps.add_report(self._roster.members[node].name, now)
        self.snapshot.add_report(report, self._roster.members[node].name, now)

    def add_flight_records(self, node: int, message: FlightRecords) -> None:
        """Add an agent's answer to `QueryFlights`. A malformed record raises an error."""
        query = self._query
        if query is None or message.serial != query.serial:
            return
        for text in message.flights:
            flight = FlightRecord.from_json(text)
            query.flights[flight.rank] = flight
        query.unanswered.update(message.unanswered)
        query.ras.update({row[0]: row for row in message.ras})
        if message.last:
            query.waits.discard(node)

    def evidence_collected(self, node: int, message: EvidenceCollected) -> None:
        if self.incident is not None and message.incident == self.incident.name:
            self.incident.waits.discard(node)
            if message.missing:
                self.incident.missing[self._roster.members[node].name] = message.missing

    # -- judgement

    def look(self, now: float) -> Incident | None:
        """Judge the ranks and act on the result. Return an Incident once its evidence is complete or late."""
        if self.incident is not None:
            return self.incident if not self.incident.waits or now >= self.incident.until else None
        self._suspended = min(self._suspended, now) if self.snapshot.is_suspended() else float("inf")
        if self._suspended <= now:
            self._report_gaps.add_pause(self._suspended, now)
            return None
        quiet = now - self.snapshot.moved
        if not self._on or quiet < QUIET_SECONDS or not len(self.snapshot) or self._observed > self.snapshot.moved:
            return None
        limits = Limits(self._config, self.snapshot.p99(), program=self._program)
        if quiet >= limits.look_after / 2:
            self._attend(now)
        # Until then only halted processes are judged, since checking ten thousand ranks takes a while.
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
        """Return whether a rank has moved since the incident was declared, which refutes it."""
        return self.snapshot.moved > incident.began

    def observe(self) -> None:
        """End the incident without a kill. The same standstill is not reported again; a later one is."""
        if self.incident is not None:
            self._observed = self.incident.began
        self.withdraw()

    def withdraw(self) -> None:
        """Withdraw the incident: the ranks are moving again, nothing is killed, and detection continues."""
        self.incident = self._query = None

    def _judge(self, seen: list[RankSample], limits: Limits, now: float) -> HangJudgement:
        locked = frozenset(one.rank for one in seen if one.lock > LOCK_HELD_SECONDS and one.state not in "TtDZX")
        self._halted = {rank: since for rank, since in self._halted.items() if since > self.snapshot.moved}
        for one in seen:
            if one.state in HALTED and not one.ended:
                self._halted.setdefault(one.rank, now)
            else:
                self._halted.pop(one.rank, None)
        query, finding = self._query, self._finding(seen, now)
        judgement = judge(
            seen,
            finding,
            limits,
            lock_held=locked,
            found=query.age(now) if query is not None else 0.0,
            halted_for={rank: now - since for rank, since in self._halted.items()},
            report_gaps=self._report_gaps.at(now),
            on_gpus=self._on_gpus,
        )
        ras = query.ras if query is not None and finding is not None else {}
        if not self._program:
            return judgement
        return with_witnesses(judgement, seen, finding, ras, most=self._config.most)

    def _finding(self, seen: list[RankSample], now: float) -> Finding | None:
        query = self._query
        if query is None or not query.is_over(now) or query.asked < self.snapshot.moved:
            return None
        if query.finding is None:
            query.finding = self._analyse(query, seen)
        return query.finding

    def _analyse(self, query: _FlightQuery, seen: list[RankSample]) -> Finding:
        # Ranks of a node that has not answered would seem never to have entered the collective.
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
        # Answers from thousands of nodes take longer; a new query in the meantime would discard them.
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
        # Each incident gets its own name, so that it is not mixed up with the files of a withdrawn one.
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
    """Return a few waiting ranks for comparison, preferably not on the culprit's node."""
    wanted = set(judgement.waiting)
    waiting = [one for one in seen if one.rank in wanted]
    waiting.sort(key=lambda one: one.node == judgement.node)
    return [one.rank for one in waiting[:_HEALTHY_RANKS]]
