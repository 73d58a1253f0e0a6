"""Injected faults hit the rank, attempt, generation and step they name, and are announced first."""

import pytest

from trainer.contract.drills import DrillEvent
from trainer.worker import drill as drills
from trainer.worker.drill import Drill, DrillError


def steps_fired(event: DrillEvent, *, rank=0, attempt=1, generation=1) -> list[tuple[str, int]]:
    told: list[tuple[str, int]] = []
    drill = Drill([event], rank=rank, attempt=attempt, generation=generation, announce=lambda *what: told.append(what))
    for step in range(1, 6):
        try:
            drill.after_step(step)
        except DrillError:
            assert told[-1] == ("raise", step)
    return told


def test_it_fires_at_its_step():
    assert steps_fired(DrillEvent(kind="raise", step=3)) == [("raise", 3)]


@pytest.mark.parametrize("place", [{"rank": 1}, {"attempt": 2}, {"generation": 2}])
def test_it_spares_everybody_else(place):
    assert steps_fired(DrillEvent(kind="raise", step=3), **place) == []


def test_zero_means_every_attempt_and_generation():
    event = DrillEvent(kind="raise", step=3, attempt=0, generation=0)
    assert steps_fired(event, attempt=4, generation=2) == [("raise", 3)]


def test_a_slow_rank_sleeps_in_every_later_step(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(drills.time, "sleep", slept.append)
    assert steps_fired(DrillEvent(kind="slow-rank", step=3, value=0.5)) == [("slow-rank", 3)]
    assert slept == [0.5, 0.5, 0.5]
