"""Programs that are slow for good reasons, simulated for hours: nothing is killed; the same standstill without its
reason is a hang."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.trainer.agent.fake_roster import make_roster
from trainer.agent.flight.flight_record import CollectiveEntry, FlightRecord, Group
from trainer.agent.watch.declare_hang import HangDetector, Incident
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.program_sample import ProgramSample
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages import agents

RANKS = range(4)
TICK = 2.0
SCALE = 0.1
"""All limits and durations are a tenth of what is written here, which a test has the time for."""
FAST = {"slow": 120.0 * SCALE, "most": 3600.0 * SCALE}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What all ranks do for some seconds. Those in `waiting` stand in a collective, the others work."""

    seconds: float
    moves: bool = False  # the cells are written
    busy: bool = False  # the working ranks use CPU time
    waiting: tuple[int, ...] = ()
    prints: bool = False
    fields: tuple[tuple[str, Any], ...] = ()  # of the samples of the working ranks


TRAINING = Part(seconds=200, moves=True, busy=True)
OTHERS = (1, 2, 3)


class Program:
    """Four ranks on two nodes, watched for as long as their parts last."""

    def __init__(self, **config: Any) -> None:
        self.now, self.roster = 1000.0, make_roster(2)
        self.watch = HangDetector(HangConfig(**{**FAST, **config}), self.roster, 1, self.now, world=4, program=True)
        self.moved = self.lived = self.printed = self.now
        self.longest, self.stepped, self.part = 0.0, False, TRAINING

    def play(self, parts: Sequence[Part]) -> Incident | None:
        for part in parts:
            self.part = part
            for _ in range(int(part.seconds * SCALE / TICK)):
                self._tick(part)
                if self.watch.incident is not None:
                    return self.watch.incident
        return None

    def _tick(self, part: Part) -> None:
        self.now += TICK
        if part.moves:
            self.longest = max(self.longest, (1.0 if self.stepped else 0.5) * (self.now - self.moved))
            self.moved, self.stepped = self.now, True
        if part.busy:
            self.lived = self.now
        if part.prints or part.moves:
            self.printed = self.now
        for node in range(2):
            samples = [self._sample(rank, part) for rank in (2 * node, 2 * node + 1)]
            rows = tuple(one.to_row() for one in samples)
            programs = tuple(one.program.to_row(one.rank) for one in samples if one.program is not None)
            self.watch.add_report(node, agents.ProgressReport(generation=1, samples=rows, programs=programs), self.now)
        self.watch.look(self.now)
        self._answer(part)

    def _sample(self, rank: int, part: Part) -> RankSample:
        age, waits = self.now - self.moved, rank in part.waiting
        alive = age if waits else self.now - self.lived
        gap = 2.0 if part.prints else 0.0
        program = ProgramSample(1, self.longest, self.now - self.printed, gap)
        one = RankSample(
            rank=rank, node="", step=9 if self.stepped else 0, phase="forward", first=not self.stepped, age=age,
            alive=min(age, alive), state="S" if waits or not part.busy else "R", program=program,
        )  # fmt: skip
        changes = dict(part.fields) if not waits else {}
        loop = changes.pop("loop", "")
        return replace(one, program=replace(program, loop=loop), **changes)

    def _answer(self, part: Part) -> None:
        sent = reversed(self.roster.members[0].peer.sent)
        query = next((each for each in sent if isinstance(each, agents.QueryFlights)), None)
        if query is None:
            return
        for node in range(2):
            flights = tuple(_flight(rank, part).to_json() for rank in (2 * node, 2 * node + 1))
            message = agents.FlightRecords(generation=1, serial=query.serial, flights=flights, last=True)
            self.watch.add_flight_records(node, message)


def _flight(rank: int, part: Part) -> FlightRecord:
    entered = 5 if rank in part.waiting else 4
    entries = (CollectiveEntry("0", 5, "all_reduce", "9", 9, "Double", "scheduled"),) if entered == 5 else ()
    return FlightRecord(
        rank=rank, groups={"0": Group(ranks=(0, 1, 2, 3), entered=entered, completed=4, description="")},
        entries=entries,
    )  # fmt: skip


def alone(seconds: float, **fields: Any) -> Part:
    """Rank 0 works while the others wait for it."""
    return Part(seconds=seconds, waiting=OTHERS, **fields)


HEALTHY = {
    "an hour of data preparation by rank 0": [alone(3600, busy=True), TRAINING],
    "an hour of waiting for data from elsewhere": [Part(seconds=3600), TRAINING],
    "a compilation of half an hour": [Part(seconds=1800, busy=True), TRAINING],
    "evaluations of ten minutes by rank 0": [TRAINING, *[alone(600, busy=True), TRAINING] * 4],
    "an evaluation of half an hour that prints": [TRAINING, alone(1800, busy=True, prints=True), TRAINING],
    "a silent save of three minutes": [TRAINING, *[alone(180), TRAINING] * 4],
    "a save of ten minutes that waits for a disk": [TRAINING, alone(600, fields=(("state", "D"),)), TRAINING],
    "rollouts of ten minutes on other machines": [Part(seconds=600), TRAINING, *[Part(seconds=600), TRAINING] * 4],
    "rollouts of ten minutes that begin late": [TRAINING, *[Part(seconds=600), TRAINING] * 4],
    "optimizers that take turns of five minutes": [TRAINING, *[Part(seconds=300, busy=True), TRAINING] * 6],
    "an upload of half an hour at the end": [TRAINING, alone(1800, busy=True)],
}


@pytest.mark.parametrize("parts", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_slow_but_healthy_program_is_left_alone(parts: list[Part]) -> None:
    incident = Program().play(parts)
    assert incident is None, incident


HUNG = {
    "asleep while the others wait": (alone(500), 300, 360),
    "in one loop": (alone(500, busy=True, fields=(("loop", "spin (train.py)"),)), 300, 360),
    "the lock is held": (alone(500, busy=True, fields=(("lock", 200.0),)), 300, 360),
    "busy for more than an hour": (alone(5000, busy=True), 3600, 3700),
    "stopped": (alone(200, fields=(("state", "T"),)), 30, 80),
    "all in one collective": (Part(seconds=500, waiting=tuple(RANKS)), 300, 360),
    "nobody waits for anybody": (Part(seconds=5000), 3600, 3700),
}


@pytest.mark.parametrize(("part", "least", "most"), HUNG.values(), ids=HUNG.keys())
def test_the_same_standstill_without_a_reason_is_a_hang(part: Part, least: float, most: float) -> None:
    program = Program()
    assert program.play([TRAINING]) is None
    incident = program.play([part])
    assert incident is not None
    assert SCALE * least <= incident.began - program.moved <= SCALE * most, incident.judgement.reason
    assert incident.judgement.culprit == (0 if len(part.waiting) < len(RANKS) else None)


def test_a_program_that_was_slow_before_is_given_three_times_as_long() -> None:
    program = Program()
    assert program.play([TRAINING, alone(600, busy=True), TRAINING]) is None
    incident = program.play([alone(3000)])
    assert incident is not None
    assert SCALE * 1800 <= incident.began - program.moved <= SCALE * 1900
