"""Whom orch names when an unmodified DDP script hangs or dies, and for what."""

import sys
from pathlib import Path

import pytest

from tests.trainer.agent.user_command.program_incidents import KINDS, matrix, play
from trainer.protocol.events import EventKind

pytestmark = pytest.mark.multi


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_forty_incidents_of_an_unmodified_program(job, tmp_path, record_property):
    cases = [(kind, seed) for seed in range(5) for kind in KINDS][:40]
    told = [play(kind, seed, job, tmp_path) for kind, seed in cases]
    record_property("confusion matrix", matrix(told))
    record_property("culprit right", sum(one.is_right for one in told))
    record_property("kind right", sum(one.taken_for == KINDS[one.kind] for one in told))
    assert not [one for one in told if one.is_wrong]
    assert sum(one.is_right for one in told) >= 36, [one for one in told if not one.is_right]


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named(kind, job, tmp_path):
    told = play(kind, 0, job, tmp_path)
    assert told.is_right, told
    assert told.taken_for == KINDS[kind], told


HEALTHY = ("evaluation", "compile", "save", "data", "rollouts", "optimizers")
SECONDS = 600


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_six_healthy_programs_run_for_ten_minutes_and_nothing_is_killed(job, record_property):
    program = str(Path(__file__).parents[3] / "programs" / "healthy.py")
    runs = {
        kind: job(folder=kind, nodes=2, ranks=1, command=[sys.executable, program, kind, str(SECONDS)])
        for kind in HEALTHY
    }
    for work in runs.values():
        work.start().go()
    for kind, work in runs.items():
        assert set(work.wait(2 * SECONDS)) == {0}, (kind, work.story())
        assert work.events(EventKind.INCIDENT) == [], (kind, work.story())
        assert {event.generation for event in work.events(EventKind.GENERATION_ENDED)} == {1}, (kind, work.story())
        assert "healthy to the end" in work.attempt.rank_log(0).read_text(), kind
    record_property("healthy minutes", SECONDS * len(HEALTHY) // 60)
