"""What is known of a user's program from one generation, and one attempt, to the next."""

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.user_command.command_attempt import BUG, Attempt, names, save
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.ladder.command_failures import has_advanced
from trainer.agent.user_command.command_run import CommandRun
from trainer.agent.user_command.progress import LOOK_SECONDS
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.decision import Action
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.messages.ranks import generation_mark
from trainer.protocol.run_dir import RunDir


def test_a_checkpoint_in_between_begins_the_row_anew(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1, restarts=99)
    for step in range(10, 60, 10):
        assert attempt.fails(while_it_ran=lambda step=step: save(out, step)).action is Action.RESTART
    assert attempt.progress.saved == 50
    assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [10, 20, 30, 40, 50]
    assert not attempt.told(EventKind.CHECKPOINT_SET_ASIDE)


def test_failures_are_counted_over_attempts_that_restart_nothing(tmp_path: Path, out: Path) -> None:
    kinds = []
    for number in (1, 2, 3):
        decision = Attempt(tmp_path, number, restarts=0).fails()
        assert decision.action is Action.END
        kinds.append(decision.known_failure.kind)
    assert kinds == [FailureKind.UNKNOWN, FailureKind.UNKNOWN, FailureKind.USER_ERROR]
    # A person has looked at it since: the next one has all its tries again.
    again = Attempt(tmp_path, 4, restarts=0).fails()
    assert again.known_failure.kind is FailureKind.UNKNOWN


def test_once_it_has_trained_failures_before_are_past_even_if_the_coordinator_dies(tmp_path: Path, out: Path) -> None:
    first = Attempt(tmp_path, 1)
    first.fails()
    first.fails()
    asyncio.run(first.program.start_generation(3))
    asyncio.run(first.program.check(GenerationState(number=3, started=time.monotonic() - 3600.0)))
    third = Attempt(tmp_path, 2).fails()
    assert third.action is Action.RESTART, third.reason


def test_what_was_not_foreseen_in_a_checkpoint_ends_no_coordinator(tmp_path, out, monkeypatch, capsys):
    def raises(*_: Any) -> Any:
        raise AssertionError("what nobody thought of")

    monkeypatch.setattr("trainer.agent.user_command.progress.assess_damage", raises)
    save(out, 10)
    assert Attempt(tmp_path, 1).fails().action is Action.RESTART
    assert "cannot check the program's checkpoints: AssertionError('what nobody thought of')" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["", "[]", '{"failures": [{"x": 1}], "aside": []}'])
def test_what_an_attempt_left_damaged_counts_for_nothing(tmp_path: Path, out: Path, left: str) -> None:
    Attempt(tmp_path, 1).dir.command_memory.write_text(left)
    attempt = Attempt(tmp_path, 2)
    attempt.fails()
    past = attempt.past
    assert len(past.failures) == 1


def test_the_newest_one_counts_once_it_has_stayed_the_same(tmp_path: Path, out: Path, monkeypatch: Any) -> None:
    seconds = [1000.0]
    monkeypatch.setattr("trainer.agent.user_command.progress.time.monotonic", lambda: seconds[0])
    attempt = Attempt(tmp_path, 1)
    now = GenerationState(number=1, started=1000.0)

    async def looks(times: int) -> None:
        for _ in range(times):
            seconds[0] += LOOK_SECONDS
            await attempt.program.check(now)
            await asyncio.gather(*filter(None, [attempt.program._checkpoints._reads._reading]))
            await attempt.program.check(now)

    async def run() -> None:
        await attempt.program.start_generation(1)
        save(out, 10)
        await looks(1)
        assert not attempt.told(EventKind.CHECKPOINT_SEEN), "it may still be written"
        (out / "checkpoint-10" / "more.json").write_text(json.dumps({"more": 1}))
        await looks(1)
        assert not attempt.told(EventKind.CHECKPOINT_SEEN), "it was still written"
        await looks(1)
        assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [10]
        save(out, 20)
        save(out, 30)
        (out / "checkpoint-10" / "state.json").unlink()
        (out / "checkpoint-10" / "more.json").unlink()
        (out / "checkpoint-10").rmdir()
        await looks(1)
        assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [10, 20]
        assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_DELETED)] == [10]

    asyncio.run(run())


def test_a_pattern_that_matches_nothing_is_named_when_the_program_has_failed_for_good(tmp_path, out):
    for second in (1, 2, 3):
        (out / f"CKPT+08-45-0{second}+00").mkdir()
    attempt = Attempt(tmp_path, 1, pattern="CKPT+*")
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.known_failure.reason.endswith(
        "; checkpoints.pattern matches nothing in checkpoints.path, which contains CKPT+08-45-01+00, "
        "CKPT+08-45-02+00, ..."
    )


def test_the_only_checkpoint_is_read_again_after_growing_pauses(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    attempt = Attempt(tmp_path, 1, restarts=9)
    assert [attempt.fails().pause for _ in range(2)] == [10.0, 20.0]
    last = attempt.fails()
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "orch finds no complete older one: repair it, or move it away to start again" in last.reason
    assert names(out) == ["checkpoint-10"]


def test_checkpoints_that_all_look_damaged_stay_and_count_as_progress(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1, restarts=99)
    for step in (10, 20, 30):
        attempt.fails(BUG, while_it_ran=lambda step=step: save(out, step, '{"tor'))
    assert attempt.progress.saved == 30
    seen = attempt.told(EventKind.CHECKPOINT_SEEN)
    assert [data["step"] for data in seen] == [10, 20, 30]
    assert {data["damage"] for data in seen} == {"is damaged: state.json is not a complete JSON file"}
    last = [attempt.fails() for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "checkpoint-30, which is damaged: state.json is not a complete JSON file" in last.reason
    assert names(out) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_the_programs_own_bug_is_its_own_whatever_its_checkpoints_look_like(tmp_path: Path, out: Path) -> None:
    save(out, 10, '{"tor')
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1, restarts=99)
    last = [attempt.fails(BUG) for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.USER_ERROR)
    assert "move it away" not in last.reason


@pytest.mark.parametrize("how", ["higher", "in place", "in place, deep", "many"])
def test_checkpoints_from_before_the_run_hide_no_progress(tmp_path: Path, out: Path, how: str) -> None:
    below = "model/rank0/state.json" if how == "in place, deep" else "state.json"
    in_place = (10, 20, 30, 40, 50)
    for step in {"higher": (5000,), "many": range(5000, 5030)}.get(how, in_place):
        folder = out / f"checkpoint-{step}"
        (folder / below).parent.mkdir(parents=True)
        (folder / below).write_text("{}")
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (1e9, 1e9))

    def saves(step: int) -> None:
        file = out / f"checkpoint-{step}" / below
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{{"step": {step}}}')

    for number, steps in ((1, (10, 20)), (2, (30, 40))):
        attempt = Attempt(tmp_path, number, restarts=99)
        for step in steps:
            assert attempt.fails(BUG, while_it_ran=lambda step=step: saves(step)).action is Action.RESTART
            past = attempt.past
            assert (past.saved, attempt.progress.saved, attempt.progress.step) == (True, step, step)
        assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN) if data["new"]] == list(steps)
    asyncio.run(attempt.program.start_generation(9))
    assert attempt.program._checkpoints.began_from.step == 40, "it has not gone on from a higher one"
    last = [attempt.fails(BUG) for _ in range(3)][-1]
    assert last.action is Action.END


def test_what_the_run_begins_from_is_what_it_fails_from_but_no_progress_of_it(tmp_path: Path, out: Path) -> None:
    save(out, 100)
    save(out, 110)
    attempt = Attempt(tmp_path, 1, restarts=99)
    attempt.fails(BUG)
    assert (attempt.progress.saved, attempt.progress.step) == (0, 110)
    assert [data.get("before_run") for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [True, True]
    attempt.fails(BUG, while_it_ran=lambda: save(out, 120))
    past = attempt.past
    assert (past.saved, attempt.progress.saved) == (True, 120)


def test_the_same_step_torn_again_and_again_is_no_progress(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    attempt = Attempt(tmp_path, 1, restarts=99)
    saved = []
    for _ in range(3):
        attempt.fails(BUG, while_it_ran=lambda: save(out, 20, '{"tor'))
        past = attempt.past
        saved.append(past.saved)
        shutil.rmtree(out / "checkpoint-20")
    assert saved == [True, False, False]


def test_a_folder_that_cannot_be_read_changes_nothing(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    attempt.fails(while_it_ran=lambda: save(out, 10))
    out.rename(tmp_path / "away")
    attempt.fails()
    assert not attempt.told(EventKind.CHECKPOINT_DELETED)
    assert attempt.progress.saved == 10


@pytest.mark.parametrize("path", ["none", "none/rank0/out"])
def test_a_folder_that_is_not_there_yet_is_no_error(tmp_path, out, path, capsys):
    attempt = Attempt(tmp_path, 1, path=path)
    attempt.fails(BUG)
    assert capsys.readouterr().err == ""


def test_of_a_workload_nothing_is_looked_at(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-1")
    run.make()
    run.attempt(1).make()
    events = EventLog(run.attempt(1).event_file("c"), "c", 1)
    assert CommandRun(run, run.attempt(1), JobConfig(), events, AttemptProgress(1, "1", lambda: 0.0)).past() is None


def write_slot(out: Path, slot: int, text: str) -> None:
    path = out / f"checkpoint-{slot}"
    path.mkdir(exist_ok=True)
    (path / "state.json").write_text(json.dumps(text))
    (path / "marker.json").write_text(json.dumps(text))


@pytest.mark.parametrize("minutes", [29, 30])
def test_a_checkpoint_written_anew_counts_half_an_hour_after_the_start(tmp_path, out, monkeypatch, minutes):
    attempt, seconds = Attempt(tmp_path, 1, restarts=2), [1000.0]
    monkeypatch.setattr("trainer.agent.user_command.progress.time.monotonic", lambda: seconds[0])
    killed = replace(BUG, exit_code=None, exception=None, message="", signal=9)

    def saves(text: str, slot: int) -> None:
        seconds[0] += minutes * 60.0
        write_slot(out, slot, text)

    advanced = []
    for number in range(5):
        decision = attempt.fails(killed, lambda number=number: saves(f"state {number} {'x' * number}", number % 2))
        advanced.append(decision.action is Action.RESTART)
        past = attempt.past
        assert has_advanced(past, 5.0) is (minutes == 30 or number < 2)
    names_of = [data["name"].partition(".")[0] for data in attempt.told(EventKind.CHECKPOINT_SEEN)]
    assert names_of == [f"checkpoint-{number % 2}" for number in range(5)], "each save is told of"
    assert len({data["name"] for data in attempt.told(EventKind.CHECKPOINT_SEEN)}) == 5
    assert [data.get("anew") is not None for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [False] * 2 + [
        True
    ] * 3


@pytest.mark.parametrize(("step", "counts"), [(40, False), (41, True)])
def test_a_checkpoint_written_anew_counts_at_once_where_the_programs_own_step_has_grown(tmp_path, out, step, counts):
    first = Attempt(tmp_path, 1, progress="step (?P<step>[0-9]+)")
    first.progress.step = 40
    first.fails(BUG, lambda: write_slot(out, 0, "a"))
    first.progress.beat(generation=1, nodes=[], state="RUNNING").write(first.dir.heartbeat)
    attempt = Attempt(tmp_path, 2, progress="step (?P<step>[0-9]+)")

    def saves() -> None:
        write_slot(out, 0, "later")
        attempt.progress.step = step

    attempt.fails(BUG, saves)
    past = attempt.past
    assert past.saved is counts


def test_the_step_is_read_once_more_before_a_failure_is_judged(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1, progress="step (?P<step>[0-9]+)")
    attempt.fails(BUG, lambda: write_slot(out, 0, "first"))

    def saves() -> None:
        write_slot(out, 0, "later")
        attempt.dir.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
        attempt.dir.rank_log(0).write_text(f"{generation_mark(2)}\nstep 41\n")

    assert "after it had saved a checkpoint of its own" in attempt.fails(BUG, saves).reason


def test_a_marker_that_changes_at_every_start_makes_no_checkpoint_new(tmp_path, out, monkeypatch):
    attempt, seconds = Attempt(tmp_path, 1), [1000.0]
    monkeypatch.setattr("trainer.agent.user_command.progress.time.monotonic", lambda: seconds[0])
    attempt.fails(BUG, lambda: write_slot(out, 0, "a"))

    def marks() -> None:
        seconds[0] += 7200.0
        (out / "checkpoint-0" / "marker.json").write_text('"started again"')

    attempt.fails(BUG, marks)
    past = attempt.past
    assert past.saved_after == 0.0
    assert len(attempt.told(EventKind.CHECKPOINT_SEEN)) == 1
