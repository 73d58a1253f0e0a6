"""A warning about a program that has saved nothing."""

import asyncio
from pathlib import Path

import pytest

from tests.trainer.agent.user_command.command_attempt import Attempt, save
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.user_command.unsaved_work import UnsavedWork, describe_loss, is_late
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog


@pytest.mark.parametrize(
    ("seconds", "steps", "limit", "late"),
    [
        (1799.0, 5000, None, False),
        (1800.0, 200, None, True),
        (3600.0, 199, None, False),  # slow steps: an hour-long first epoch may be usual
        (3600.0, 0, None, False),  # it may still prepare its data
        (7200.0, 0, None, True),
        (599.0, 9999, 1200.0, False),
        (600.0, 3, 1200.0, True),
        (1800.0, 200, 86400.0, True),
    ],
)
def test_a_program_is_late_after_a_while_or_half_of_its_time(seconds, steps, limit, late) -> None:
    assert is_late(seconds, steps, limit) is late


def test_the_cost_of_a_failure_is_given_in_steps_and_time() -> None:
    assert describe_loss(2520.0, 1240) == "no checkpoint after 1,240 steps, 42 min: a failure repeats them all"
    assert describe_loss(9000.0, 0) == "no checkpoint after 2.5 h: a failure repeats it all"


class Watched:
    """An attempt whose program has trained for an hour."""

    def __init__(self, tmp_path: Path) -> None:
        self.attempt, self.now = Attempt(tmp_path, 1), 3600.0
        config = JobConfig(command=("python", "train.py"))
        events = EventLog(self.attempt.dir.event_file("coordinator"), "coordinator", 1)
        self.progress = self.attempt.progress
        self.progress.step, self.progress.phase = 1240, "forward"
        self.work = UnsavedWork(self.attempt.dir, config, events, self.progress, lambda: self.now)

    def check(self, *, saved: bool = False, warned: bool = False, folder: str = "") -> bool:
        self.now += 60.0
        return asyncio.run(self.work.check(0.0, folder, saved=saved, warned=warned))

    def warnings(self) -> list[dict[str, object]]:
        return self.attempt.told(EventKind.CHECKPOINT_MISSING)


def test_one_event_and_a_note_until_a_checkpoint_is_seen(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    assert one.check(folder="/data/out")
    assert one.check(folder="/data/out", warned=True)
    (warning,) = one.warnings()
    assert warning["step"] == 1240
    assert warning["reason"] == "no checkpoint after 1,240 steps, 61 min: a failure repeats them all"
    assert warning["looked"] == (
        "looked for checkpoint-* in /data/out and at what its ranks save with torch or a framework: if it saves "
        "elsewhere, change checkpoints.path, or see docs/own-loops.md"
    )
    beat = one.progress.beat(generation=1, nodes=[], state="running")
    assert beat.unsaved.startswith("no checkpoint after 1,240 steps, 62 min")
    one.check(saved=True, warned=True)
    assert one.progress.beat(generation=1, nodes=[], state="running").unsaved == ""


def test_a_program_that_orch_cannot_see_is_not_said_to_save_nothing(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.progress.step, one.progress.phase, one.now = 0, "command", 7200.0
    assert one.check()
    (warning,) = one.warnings()
    assert warning["looked"] == "orch sees no saves of this program: set checkpoints.path, or see docs/own-loops.md"


def test_a_save_that_a_rank_reports_counts_wherever_it_is(tmp_path: Path) -> None:
    one = Watched(tmp_path)
    one.attempt.dir.program_saves(0).parent.mkdir(exist_ok=True)
    one.attempt.dir.program_saves(0).write_text('{"rank": 0, "step": 0, "path": "/far/model.pt", "time": 1.0}\n')
    assert not one.check()
    assert not one.warnings()
    assert one.progress.unsaved == ""


def test_the_next_attempt_warns_no_more_and_an_old_checkpoint_is_enough(tmp_path: Path, out: Path) -> None:
    def runs(attempt: Attempt, restored: int = 0) -> int:
        async def run() -> None:
            await attempt.program.start_generation(1)
            attempt.progress.step = 500
            await attempt.program.check(GenerationState(number=1, started=-7200.0, restored=restored))

        asyncio.run(run())
        return len(attempt.told(EventKind.CHECKPOINT_MISSING))

    first = Attempt(tmp_path, 1)
    assert runs(first, restored=400) == 0, "it continues from a checkpoint that orch does not see"
    assert runs(first) == 1
    first.stops()
    assert runs(Attempt(tmp_path, 2)) == 0
    save(out, 10)
    (tmp_path / "other").mkdir()
    assert runs(Attempt(tmp_path / "other", 1, path="../out")) == 0, "it could continue from this one"
