"""The coordinator's watch: whom it asks what, and when it is sure."""

import heapq
import random
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.trainer.agent.fake_roster import make_roster
from trainer.agent.flight.flight_record import CollectiveEntry, FlightRecord, Group
from trainer.agent.watch.declare_hang import HangDetector, Incident
from trainer.agent.watch.hang_limits import RankSample, ReportSchedule
from trainer.agent.watch.waiting_ranks import HangKind
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages import agents

M = TypeVar("M")


class Job:
    """Two nodes with two ranks each, and the time; `idle` more nodes count as members, and have no ranks."""

    def __init__(self, idle: int = 0, **config: Any) -> None:
        self.now = 100.0
        self.roster = make_roster(2 + idle)
        self.watch = HangDetector(HangConfig(**config), self.roster, 3, self.now, world=4)
        self.moved = [self.now] * 4
        self.state = ["S"] * 4
        self.phase = ["optimizer"] * 4

    def report(self) -> None:
        for node in range(2):
            rows = tuple(self.row(rank) for rank in (2 * node, 2 * node + 1))
            self.watch.add_report(node, agents.ProgressReport(generation=3, samples=rows), self.now)

    def row(self, rank: int) -> agents.SampleRow:
        age = self.now - self.moved[rank]
        return RankSample(
            rank=rank, node="", step=20, phase=self.phase[rank], first=False, age=age, alive=age, state=self.state[rank]
        ).to_row()

    def passes(self, seconds: float) -> Any:
        """Half a second after the other; the incident, once there is one whose evidence is there."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.report()
            if (incident := self.watch.look(self.now)) is not None:
                return incident
        return None

    def asked(self, kind: type[M]) -> list[M]:
        return [message for message in self.roster.members[0].peer.sent if isinstance(message, kind)]

    def answer(self, node: int, **fields: Any) -> None:
        serial = self.asked(agents.QueryFlights)[-1].serial
        flights = tuple(FlightRecord(rank=rank).to_json() for rank in (2 * node, 2 * node + 1))
        answer = agents.FlightRecords(generation=3, serial=serial, flights=flights, last=True)
        self.watch.add_flight_records(node, replace(answer, **fields))


def test_while_somebody_moves_nobody_is_asked() -> None:
    job = Job()
    for _ in range(60):
        job.moved[3] = job.now
        assert job.passes(0.5) is None
    assert not job.asked(agents.QueryFlights)


def test_everybody_is_asked_for_records_before_anybody_is_blamed() -> None:
    job = Job()
    job.phase[2] = "data"
    assert job.passes(5) is None
    (question,) = job.asked(agents.QueryFlights)
    assert question.generation == 3
    assert not job.asked(agents.CollectEvidence)


def test_a_hang_is_declared_and_concluded_when_the_evidence_is_there() -> None:
    job = Job()
    job.phase[2] = "data"
    assert job.passes(7.5) is None
    for node in (0, 1):
        job.answer(node)
    assert job.passes(1) is None
    (order,) = job.asked(agents.CollectEvidence)
    assert (order.incident, order.full[0]) == ("g003-stuck_in_data", 2)
    assert set(order.full) <= {0, 1, 2}, "of the waiting ranks, first those of the other node"
    job.watch.evidence_collected(0, agents.EvidenceCollected(generation=3, incident=order.incident))
    assert job.watch.look(job.now) is None
    job.watch.evidence_collected(
        1, agents.EvidenceCollected(generation=3, incident=order.incident, missing={"stacks": "late"})
    )
    incident = job.watch.look(job.now)
    assert (incident.judgement.culprit, incident.judgement.kind) == (2, HangKind.STUCK_IN_DATA)
    assert incident.missing == {"n1": {"stacks": "late"}}


def test_evidence_that_does_not_come_is_not_waited_for_beyond_its_time() -> None:
    job = Job(evidence=3.0)
    job.state[1] = "T"
    incident = job.passes(20)
    assert incident.waits == {0, 1}
    assert job.now - incident.began == pytest.approx(3.0, abs=0.5)


def test_a_stopped_process_needs_no_records() -> None:
    job = Job(stopped=3.0)
    job.state[1] = "T"
    job.passes(5)
    assert job.watch.incident.judgement.kind is HangKind.STOPPED


def test_who_moves_again_meanwhile_is_let_go() -> None:
    job = Job(evidence=4.0)
    job.state[1] = "T"
    job.passes(4)
    declared = job.watch.incident
    assert declared is not None
    job.state[1], job.moved[1] = "R", job.now + 0.4
    job.passes(1)
    assert job.watch.moved_since(declared)
    job.watch.withdraw()
    assert job.watch.incident is None
    assert job.passes(2) is None


def test_all_parts_of_an_answer_are_waited_for() -> None:
    job = Job(least=3.0)
    job.phase[2] = "data"
    job.passes(3)
    job.answer(0)
    job.answer(1, last=False)
    job.watch.look(job.now)
    assert not job.asked(agents.CollectEvidence)
    job.answer(1)
    job.watch.look(job.now)
    assert job.asked(agents.CollectEvidence)


def test_a_node_that_has_not_answered_is_not_taken_for_one_whose_ranks_never_came() -> None:
    job = Job(least=3.0)
    job.phase[2] = "data"
    job.passes(3)
    flights = tuple(
        FlightRecord(
            rank=rank,
            groups={"0": Group(ranks=(0, 1, 2, 3), entered=5, completed=4, description="")},
            entries=(CollectiveEntry("0", 5, "all_reduce", "9", 9, "Double", "scheduled"),),
        ).to_json()
        for rank in (2, 3)
    )
    job.answer(1, flights=flights)
    job.passes(3)
    (order,) = job.asked(agents.CollectEvidence)
    assert order.incident != "g003-stuck_in_compute"
    assert order.full[0] == 2, "the one that stands where it waits for nobody"


def test_a_second_incident_has_a_folder_of_its_own() -> None:
    job = Job(evidence=4.0)
    job.state[1] = "T"
    job.passes(4)
    job.state[1], job.moved[1] = "R", job.now + 0.4
    job.passes(1)
    job.watch.withdraw()
    job.state[1] = "T"
    job.passes(6)
    assert [order.incident for order in job.asked(agents.CollectEvidence)] == ["g003-stopped", "g003-stopped-2"]


def test_an_answer_to_an_older_question_does_not_count() -> None:
    job = Job()
    job.phase[2] = "data"
    job.passes(5)
    job.answer(0, serial=77)
    job.answer(1, serial=77)
    job.passes(1)
    assert not job.asked(agents.CollectEvidence)


def test_the_agents_of_a_large_job_are_asked_for_more_before_anybody_is_judged() -> None:
    job = Job(idle=1000)
    job.phase[2] = "data"
    assert job.passes(1.5) is None
    assert not job.asked(agents.ReportOften)
    assert job.passes(0.5) is None
    assert (len(job.asked(agents.ReportOften)), len(job.asked(agents.QueryFlights))) == (1, 0)
    assert job.passes(4.0) is None
    assert len(job.asked(agents.ReportOften)) == 1, "it lasts for ten seconds"
    assert job.passes(4.0) is None
    assert len(job.asked(agents.ReportOften)) == 2
    assert not few_nodes().asked(agents.ReportOften)


def few_nodes() -> Job:
    job = Job()
    job.phase[2] = "data"
    assert job.passes(6.0) is None
    return job


def test_a_halted_process_is_seen_before_anybody_is_judged_by_time() -> None:
    job = Job(idle=1000)
    job.state[1] = "T"
    assert job.passes(4.5) is not None or job.asked(agents.CollectEvidence)


def test_all_ranks_that_are_stopped_are_suspended_and_that_time_does_not_count() -> None:
    job = Job(stopped=3.0, least=8.0)
    job.phase[2] = "data"
    job.state = ["T"] * 4
    assert job.passes(600) is None
    job.state = ["S"] * 4
    assert job.passes(6) is None
    assert not job.asked(agents.CollectEvidence)
    job.passes(1)
    for node in (0, 1):
        job.answer(node)
    job.passes(3)
    assert job.watch.incident.judgement.culprit == 2, "it has not moved for 8 s since then"


def test_a_stopped_rank_hangs_if_one_of_the_others_is_not_stopped() -> None:
    job = Job(stopped=3.0)
    job.state = ["T", "T", "T", "S"]
    job.passes(5)
    assert job.watch.incident.judgement.kind is HangKind.STOPPED


def test_who_was_halted_and_goes_on_is_forgotten() -> None:
    job = Job()
    job.state[1] = "T"
    assert job.passes(1.0) is None
    job.state[1] = "S"
    assert job.passes(1.0) is None
    assert not job.watch.snapshot.halted
    assert not job.watch._halted


BEGIN = 1000.0
CULPRIT = 3


class LargeJob:
    """One rank on each node, which moves four times a second until `stands`, and again from `goes_on`."""

    def __init__(self, nodes: int, stands: float, goes_on: float = float("inf"), *, seed: int = 1) -> None:
        self.draw, self.nodes, self.now = random.Random(seed), nodes, BEGIN
        self.stands, self.goes_on = BEGIN + stands, BEGIN + goes_on
        roster = make_roster(nodes, nodes)
        self.wires = [member.peer for member in roster.members.values()]
        self.watch = HangDetector(HangConfig(), roster, 1, BEGIN, world=nodes)
        self.agents = [ReportSchedule(node, nodes, BEGIN + self.draw.uniform(0, 2)) for node in range(nodes)]
        self.first = [self.draw.uniform(0, 0.25) for _ in range(nodes)]
        self.told = [-1.0] * nodes
        self.posted: list[tuple[float, int, int, agents.FromAgent]] = []

    def passes(self, seconds: float, *, mute: AbstractSet[int] = frozenset(), frozen: int = -1) -> Incident | None:
        """The incident that was declared; `mute` agents have no flight records, `frozen` stands with its whole node."""
        for tick in range(int(seconds * 10)):
            self.now = BEGIN + (tick + 1) / 10
            for node in range(self.nodes):
                if node != frozen or not self.stands <= self.now < self.goes_on:
                    self._agent_looks(node, mute)
            while self.posted and self.posted[0][0] <= self.now:
                _, _, node, message = heapq.heappop(self.posted)
                if isinstance(message, agents.FlightRecords):
                    self.watch.add_flight_records(node, message)
                elif isinstance(message, agents.ProgressReport):
                    self.watch.add_report(node, message, self.now)
            if tick % 5 == 0:
                self.watch.look(self.now)
            if self.watch.incident is not None:
                return self.watch.incident
        return None

    def _agent_looks(self, node: int, mute: AbstractSet[int]) -> None:
        for message in self.wires[node].sent:
            if isinstance(message, agents.ReportOften):
                self.agents[node].attend(message.seconds, self.now)
            elif isinstance(message, agents.QueryFlights) and node not in mute:
                flights = (FlightRecord(rank=node).to_json(),)
                answer = agents.FlightRecords(generation=1, serial=message.serial, flights=flights, last=True)
                self._post(self.draw.uniform(0.05, 1.6), node, answer)
        self.wires[node].sent.clear()
        if self.agents[node].due(self.now):
            self._post(self.draw.expovariate(50), node, agents.ProgressReport(generation=1, samples=self._rows(node)))

    def _post(self, delay: float, node: int, message: agents.FromAgent) -> None:
        heapq.heappush(self.posted, (self.now + delay, len(self.posted) + int(self.now * 1e6), node, message))

    def _rows(self, node: int) -> tuple[agents.SampleRow, ...]:
        until = self.stands if self.stands <= self.now < self.goes_on else self.now
        moved = max(BEGIN, until - (until - self.first[node]) % 0.25)
        age, news = max(0.0, self.now - moved), moved != self.told[node]
        self.told[node] = moved
        phase = "data" if node == CULPRIT and until == self.stands else "optimizer"
        sample = RankSample(rank=node, node="", step=20, phase=phase, first=False, age=age, alive=age, state="S")
        return (sample.to_row(),) if news or age > 1.0 else ()


ALL_ANSWER: frozenset[int] = frozenset()
ONE_IS_MUTE = frozenset({5})
SIZES = [(1250, ALL_ANSWER), (2000, ONE_IS_MUTE)]
MORE_SIZES = [(600, ALL_ANSWER), (600, ONE_IS_MUTE), (1250, ONE_IS_MUTE), (2000, ALL_ANSWER)]


@pytest.mark.parametrize(
    ("nodes", "mute"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.proof) for size in MORE_SIZES)]
)
def test_a_hang_is_declared_in_time(nodes: int, mute: frozenset[int]) -> None:
    job = LargeJob(nodes, stands=6.0)
    found = job.passes(26.0, mute=mute)
    assert found.judgement.culprit == CULPRIT
    assert job.now - job.stands <= 9.0 + nodes / 300 * bool(mute)


@pytest.mark.parametrize("stands", [6.0, pytest.param(7.3, marks=pytest.mark.proof)])
def test_a_node_that_stands_still_for_a_while_is_no_hang(stands: float) -> None:
    assert LargeJob(1000, stands, stands + 12.0).passes(stands + 14.0, frozen=7) is None
