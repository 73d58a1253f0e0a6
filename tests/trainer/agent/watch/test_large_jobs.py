"""Jobs of many nodes whose agents report rarely: hangs are found in time, and what only stands still is none."""

import heapq
import random
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.nodes.roster import Member, Roster
from trainer.agent.watch.declare_hang import HangDetector, Incident
from trainer.agent.watch.hang_limits import RankSample, ReportSchedule
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages import agents

BEGIN = 1000.0
CULPRIT = 3


class Wire:
    """A peer that only remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[agents.ToAgent] = []

    def send(self, message: agents.ToAgent) -> None:
        self.sent.append(message)


class LargeJob:
    """One rank on each node, which moves four times a second until `stands`, and again from `goes_on`."""

    def __init__(self, nodes: int, stands: float, goes_on: float = float("inf"), *, seed: int = 1) -> None:
        self.draw, self.nodes, self.now = random.Random(seed), nodes, BEGIN
        self.stands, self.goes_on = BEGIN + stands, BEGIN + goes_on
        roster = Roster(nodes, 1, lambda *_: None)
        self.wires = [Wire() for _ in range(nodes)]
        for node in range(nodes):
            peer: Any = self.wires[node]
            roster.members[node] = Member(node=node, name=f"n{node}", peer=peer, last_message_at=BEGIN)
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
    assert found is not None
    assert found.judgement.culprit == CULPRIT
    assert job.now - job.stands <= 9.0 + nodes / 300 * bool(mute)


@pytest.mark.parametrize("stands", [6.0, pytest.param(7.3, marks=pytest.mark.proof)])
def test_a_node_that_stands_still_for_a_while_is_no_hang(stands: float) -> None:
    """Its agent says nothing either, so that the last that was heard of it may be older than its stand."""
    assert LargeJob(1000, stands, stands + 12.0).passes(stands + 14.0, frozen=7) is None
