"""What is known of a user's program from one generation, and one attempt, to the next."""

import asyncio
import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.agent.attempt_state.attempt_state import AttemptProgress
from trainer.agent.attempt_state.generation import Generation
from trainer.agent.ladder.in_job_policy import Action, Decision, Situation, decide
from trainer.agent.user_command.command_run import CommandMemory, CommandRun
from trainer.agent.user_command.progress import LOOK_SECONDS
from trainer.agent.watch.root_cause import RankEnd
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog, read_events
from trainer.contract.failures.outcome import FailureKind
from trainer.contract.run_dir import RunDir
from trainer.contract.user_command.command_progress import CommandCheckpointsConfig

TORN = RankEnd(
    rank=0, node="n0", at=0.0, step=None, exit_code=1, exception="EOFError", message="Ran out of input",
    lines=("Traceback (most recent call last):", "    state = torch.load(path)", "EOFError: Ran out of input"),
)  # fmt: skip


class Attempt:
    """One attempt of a run of a program; every generation of it is over when `fails` returns."""

    def __init__(
        self, root: Path, number: int, restarts: int = 5, *, pattern: str = "checkpoint-*", path: str = "out"
    ) -> None:
        self.run = RunDir(root / "run-1")
        if number == 1:
            self.run.make()
        self.dir = self.run.attempt(number)
        self.dir.make()
        checkpoints = CommandCheckpointsConfig(path=str(root / path), pattern=pattern)
        self.progress, self.restarts, self.budget, self.number = (
            AttemptProgress(number, "1", lambda: 0.0),
            0,
            restarts,
            0,
        )
        events = EventLog(self.dir.event_file("coordinator"), "coordinator", number)
        config = JobConfig(command=("python", "train.py"), checkpoints=checkpoints)
        self.program = CommandRun(self.run, self.dir, config, events, self.progress)

    def fails(self, end: RankEnd = TORN, while_it_ran: Any = None, **generation: Any) -> Decision:
        return asyncio.run(self._fails(end, while_it_ran, **generation))

    async def _fails(self, end: RankEnd, while_it_ran: Any, *, cleared: bool = True) -> Decision:
        self.number += 1
        now = Generation(number=self.number, started=100.0, first_failure=105.0)
        await self.program.start_generation(self.number)
        if while_it_ran is not None:
            while_it_ran()
            await self.program.check(Generation(number=self.number, started=100.0, first_failure=float("inf")))
        situation = Situation(
            world=1, ends=(end,), since_failure=5.0, ran_for=5.0, restarts=self.restarts, budget=self.budget,
            backoff=(10.0, 900.0), command=self.program.past(),
        )  # fmt: skip
        decision = decide(situation)
        self.restarts += decision.action is Action.RESTART
        await self.program.end_generation(decision, now, cleared=cleared)
        return decision

    def stops(self, seconds: float = 60.0) -> None:
        """One more generation, which a preemption ends."""
        self.number += 1
        now = Generation(number=self.number, started=time.monotonic() - seconds)
        asyncio.run(self.program.start_generation(self.number))
        asyncio.run(self.program.end_generation(Decision(action=Action.STOP, reason="preemption"), now, cleared=True))

    def told(self, kind: EventKind) -> list[dict[str, Any]]:
        events, _ = read_events(self.dir.event_file("coordinator"))
        return [event.data for event in events if event.kind == kind]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def save(out: Path, step: int, text: str = "{}") -> None:
    (out / f"checkpoint-{step}").mkdir()
    (out / f"checkpoint-{step}" / "state.json").write_text(text)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def test_a_checkpoint_in_between_begins_the_row_anew(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1, restarts=99)
    for step in range(10, 60, 10):
        assert attempt.fails(while_it_ran=lambda step=step: save(out, step)).action is Action.RESTART
    assert attempt.progress.saved == 50
    assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN)] == [10, 20, 30, 40, 50]
    assert not attempt.told(EventKind.CHECKPOINT_SET_ASIDE)


def test_nothing_is_set_aside_while_something_of_the_generation_may_live(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1)
    attempt.fails(cleared=False)
    attempt.fails(cleared=False)
    assert names(out) == ["checkpoint-10", "checkpoint-20"]


def test_failures_are_counted_over_attempts_that_restart_nothing(tmp_path: Path, out: Path) -> None:
    """With no restart in place every attempt sees one failure only."""
    kinds = []
    for number in (1, 2, 3):
        decision = Attempt(tmp_path, number, restarts=0).fails()
        assert decision.action is Action.END
        assert decision.failure is not None
        kinds.append(decision.failure.kind)
    assert kinds == [FailureKind.UNKNOWN, FailureKind.UNKNOWN, FailureKind.USER_ERROR]
    # A person has looked at it since: the next one has all its tries again.
    again = Attempt(tmp_path, 4, restarts=0).fails()
    assert again.failure is not None
    assert again.failure.kind is FailureKind.UNKNOWN


def test_one_checkpoint_after_another_is_not_set_aside_over_attempts(tmp_path: Path, out: Path) -> None:
    for step in (10, 20, 30, 40):
        save(out, step)
    for number in (1, 2):
        assert Attempt(tmp_path, number, restarts=0).fails().action is Action.END
    assert names(out) == [f"checkpoint-{step}" for step in (10, 20, 30)]
    last = Attempt(tmp_path, 3, restarts=0).fails()
    assert last.failure is not None
    assert last.failure.kind is FailureKind.STORAGE
    assert names(out) == [f"checkpoint-{step}" for step in (10, 20, 30, 40)], "it was not the checkpoint"


def test_what_was_set_aside_is_remembered_however_an_attempt_ends(tmp_path: Path, out: Path) -> None:
    for step in (10, 20, 30, 40):
        save(out, step)
    first = Attempt(tmp_path, 1)
    first.fails()
    first.fails()
    first.stops()
    Attempt(tmp_path, 2)  # it was never launched
    second = Attempt(tmp_path, 3)
    last = second.fails()
    assert last.failure is not None
    assert last.failure.kind is FailureKind.STORAGE
    assert names(out) == [f"checkpoint-{step}" for step in (10, 20, 30, 40)], "it was not the checkpoint"


@pytest.mark.parametrize("renamed", [True, False])
def test_a_coordinator_that_dies_while_it_sets_one_aside(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    class Killed(BaseException):
        pass

    def dies(one: Any, target: Path, config: Any) -> bool:
        if renamed:
            target.parent.mkdir(parents=True)
            one.path.rename(target)
        killed.append(True)
        return None  # type: ignore[return-value]

    killed: list[bool] = []
    save(out, 10)
    save(out, 20)
    first = Attempt(tmp_path, 1)
    first.fails()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.agent.user_command.command_run.set_aside", dies)
        keep = first.program._keep

        async def keeps(memory: CommandMemory) -> bool:
            if killed:
                raise Killed
            return await keep(memory)

        patch.setattr(first.program, "_keep", keeps)
        with pytest.raises(Killed):
            first.fails()
    second = Attempt(tmp_path, 2)
    asyncio.run(second.program.start_generation(1))
    past = second.program.past()
    assert past is not None
    assert past.aside == (("checkpoint-20",) if renamed else ())


def test_nothing_is_renamed_that_could_not_be_written_down(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("trainer.agent.user_command.command_run.write_durably", refuses)
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    attempt.fails()
    assert names(out) == ["checkpoint-10", "checkpoint-20"]


def test_torn_ones_are_put_back_too_where_the_older_one_made_no_difference(tmp_path: Path, out: Path) -> None:
    for step, text in ((10, "{}"), (20, '{"to'), (30, '{"to')):
        save(out, step, text)
    attempt, last = Attempt(tmp_path, 1, restarts=9), None
    for _ in range(9):
        last = attempt.fails()
        if last.action is Action.END:
            break
    assert attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert last is not None
    assert last.failure is not None
    assert last.failure.kind is FailureKind.STORAGE
    assert names(out) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_once_it_has_trained_failures_before_are_past_even_if_the_coordinator_dies(tmp_path: Path, out: Path) -> None:
    first = Attempt(tmp_path, 1)
    first.fails()
    first.fails()
    asyncio.run(first.program.start_generation(3))
    asyncio.run(first.program.check(Generation(number=3, started=time.monotonic() - 3600.0)))
    third = Attempt(tmp_path, 2).fails()
    assert third.action is Action.RESTART, third.reason


def test_what_was_not_foreseen_in_a_checkpoint_ends_no_coordinator(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: Any) -> Any:
        raise AssertionError("what nobody thought of")

    monkeypatch.setattr("trainer.agent.user_command.progress.examined", raises)
    save(out, 10)
    assert Attempt(tmp_path, 1).fails().action is Action.RESTART
    assert (
        "cannot look at the program's checkpoints: AssertionError('what nobody thought of')" in capsys.readouterr().err
    )


@pytest.mark.parametrize("left", ["", "[]", '{"failures": [{"x": 1}], "aside": []}'])
def test_what_an_attempt_left_damaged_counts_for_nothing(tmp_path: Path, out: Path, left: str) -> None:
    Attempt(tmp_path, 1).dir.command_memory.write_text(left)
    attempt = Attempt(tmp_path, 2)
    attempt.fails()
    past = attempt.program.past()
    assert past is not None
    assert len(past.failures) == 1


def test_the_newest_one_counts_once_it_has_stayed_the_same(tmp_path: Path, out: Path, monkeypatch: Any) -> None:
    attempt = Attempt(tmp_path, 1)
    seconds = [1000.0]
    monkeypatch.setattr("trainer.agent.user_command.progress.time.monotonic", lambda: seconds[0])
    now = Generation(number=1, started=1000.0)

    async def looks(times: int) -> None:
        for _ in range(times):
            seconds[0] += LOOK_SECONDS
            await attempt.program.check(now)
            await asyncio.gather(*(task for task in [attempt.program._command_progress._looking] if task))  # type: ignore[union-attr]
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


def test_a_file_that_names_the_newest_one_follows_it_away_and_back(tmp_path: Path, out: Path) -> None:
    """As DeepSpeed's `latest`: without it the program would look for the one that was moved away."""
    for step in (10, 20):
        save(out, step)
    (out / "latest").write_text("checkpoint-20")
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    assert attempt.fails().pause == 0.0
    assert (names(out), (out / "latest").read_text()) == (["checkpoint-10", "latest"], "checkpoint-10")
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert aside["reason"].endswith("; latest names checkpoint-10 from now on")
    assert attempt.fails().action is Action.END  # alike: it was not the checkpoint
    assert (names(out), (out / "latest").read_text()) == (["checkpoint-10", "checkpoint-20", "latest"], "checkpoint-20")


def save_ranks(out: Path, step: int, torn: int | None = None) -> None:
    for rank in (0, 1):
        (out / f"step{step}-rank{rank}.json").write_text('{"tor' if rank == torn else "{}")


@pytest.mark.parametrize("torn", [0, 1, None])
def test_ranks_with_a_file_each_all_go_on_from_the_older_step(tmp_path: Path, out: Path, torn: int | None) -> None:
    save_ranks(out, 10)
    save_ranks(out, 20, torn)
    attempt = Attempt(tmp_path, 1, pattern="step*-rank0.json")
    attempt.fails()
    attempt.fails()
    assert names(out) == ["step10-rank0.json", "step10-rank1.json"]
    last = attempt.fails(BUG if torn is not None else TORN)
    if torn is None:  # alike: it was not the checkpoint
        assert last.action is Action.END
        assert names(out) == [f"step{step}-rank{rank}.json" for step in (10, 20) for rank in (0, 1)]


def test_a_step_that_a_rank_has_no_file_of_is_no_older_one(tmp_path: Path, out: Path) -> None:
    """Without its own file it would begin anew, or go on from a step before."""
    for step in (10, 20, 30):
        save_ranks(out, step, 0 if step == 30 else None)
    (out / "step20-rank1.json").unlink()
    attempt, before = Attempt(tmp_path, 1, pattern="step*-rank0.json"), names(out)
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.STORAGE)
    assert names(out) == before


def test_the_rest_of_one_that_was_moved_away_follows_with_the_next_coordinator(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ranks(out, 10)
    save_ranks(out, 20, 0)
    first = Attempt(tmp_path, 1, pattern="step*-rank0.json")
    first.fails()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.agent.user_command.set_aside.move_siblings", lambda *_: True)
        first.fails()
    assert names(out) == ["step10-rank0.json", "step10-rank1.json", "step20-rank1.json"]
    asyncio.run(Attempt(tmp_path, 2, pattern="step*-rank0.json").program.start_generation(1))
    assert names(out) == ["step10-rank0.json", "step10-rank1.json"]


def test_nothing_is_moved_from_the_folder_of_one_rank(tmp_path: Path, out: Path) -> None:
    for rank in (0, 1):
        (out / f"rank{rank}").mkdir()
        for step, text in ((10, "{}"), (20, '{"tor' if rank == 0 else "{}")):
            save(out / f"rank{rank}", step, text)
    attempt = Attempt(tmp_path, 1, path="out/rank0")
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.STORAGE)
    words = "orch moves none, because checkpoints.path names the folder of one rank: "
    assert f"{words}{out / 'rank1'} is another" in last.reason
    assert names(out / "rank0") == names(out / "rank1") == ["checkpoint-10", "checkpoint-20"]


def test_a_pattern_that_matches_nothing_is_named_when_the_program_has_failed_for_good(
    tmp_path: Path, out: Path
) -> None:
    for second in (1, 2, 3):
        (out / f"CKPT+08-45-0{second}+00").mkdir()
    attempt = Attempt(tmp_path, 1, pattern="CKPT+*")
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.failure is not None
    assert last.failure.reason.endswith(
        "; checkpoints.pattern matches nothing in checkpoints.path, where there are CKPT+08-45-01+00, "
        "CKPT+08-45-02+00, ..."
    )


def test_nothing_is_moved_where_steps_begin_anew(tmp_path: Path, out: Path) -> None:
    """The checkpoint with the highest step is not the one that the program loads."""
    saved = ("stage1_epoch_10", "stage1_epoch_20", "stage1_epoch_30", "stage2_epoch_10", "stage2_epoch_20")
    for at, name in enumerate(saved):
        (out / f"{name}.json").write_text('{"tor' if name == "stage2_epoch_20" else "{}")
        os.utime(out / f"{name}.json", ns=(at, at))
    attempt = Attempt(tmp_path, 1, pattern="stage*_epoch_*.json")
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "orch moves none, because steps begin anew: stage2_epoch_20.json was written after it" in last.reason
    assert names(out) == [f"{name}.json" for name in saved]


def test_what_names_one_that_was_moved_away_is_repaired_by_the_next_coordinator(tmp_path: Path, out: Path) -> None:
    for step in (10, 20):
        save(out, step)
    first = Attempt(tmp_path, 1)
    first.fails()
    (out / "latest").write_text("checkpoint-20")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.agent.user_command.command_run.retarget", lambda *_, **__: False)
        first.fails()
    assert (out / "latest").read_text() == "checkpoint-20"
    asyncio.run(Attempt(tmp_path, 2).program.start_generation(1))
    assert (out / "latest").read_text() == "checkpoint-10"


def test_a_torn_one_stays_away_when_the_older_one_fails_in_another_way(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1, restarts=9)
    attempt.fails()
    attempt.fails()
    bug = RankEnd(rank=0, node="n0", at=0.0, step=None, exit_code=1, exception="KeyError", message="lr")
    for _ in range(3):
        last = attempt.fails(bug)
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.USER_ERROR)
    assert names(out) == ["checkpoint-10"]


def test_the_only_checkpoint_is_read_again_after_growing_pauses(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    attempt = Attempt(tmp_path, 1, restarts=9)
    assert [attempt.fails().pause for _ in range(2)] == [10.0, 20.0]
    last = attempt.fails()
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "orch sees no whole older one: repair it, or move it away to begin anew" in last.reason
    assert names(out) == ["checkpoint-10"]


def test_a_first_checkpoint_that_is_torn_takes_nothing_with_it(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    attempt.fails(while_it_ran=lambda: save(out, 10, '{"tor'))
    attempt.fails()
    attempt.fails()
    assert names(out) == []


def test_the_last_one_of_many_stays_although_it_is_torn(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    (out / "checkpoint-10" / "state.json").write_text('{"tor')
    attempt.fails()
    attempt.fails()
    assert names(out) == ["checkpoint-10"]


BUG = RankEnd(rank=0, node="n0", at=0.0, step=None, exit_code=1, exception="KeyError", message="lr")


def test_checkpoints_that_all_look_damaged_stay_and_count_as_progress(tmp_path: Path, out: Path) -> None:
    """The sign may be wrong for all of them alike."""
    attempt = Attempt(tmp_path, 1, restarts=99)
    for step in (10, 20, 30):
        attempt.fails(BUG, while_it_ran=lambda step=step: save(out, step, '{"tor'))
    assert attempt.progress.saved == 30
    seen = attempt.told(EventKind.CHECKPOINT_SEEN)
    assert [data["step"] for data in seen] == [10, 20, 30]
    assert {data["damage"] for data in seen} == {"is damaged: state.json is no whole JSON file"}
    last = [attempt.fails() for _ in range(3)][-1]
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "checkpoint-30, which is damaged: state.json is no whole JSON file" in last.reason
    assert names(out) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_the_programs_own_bug_is_its_own_whatever_its_checkpoints_look_like(tmp_path: Path, out: Path) -> None:
    save(out, 10, '{"tor')
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1, restarts=99)
    last = [attempt.fails(BUG) for _ in range(3)][-1]
    assert last.failure is not None
    assert (last.action, last.failure.kind) == (Action.END, FailureKind.USER_ERROR)
    assert "move it away" not in last.reason


@pytest.mark.parametrize("how", ["higher", "in place", "many"])
def test_checkpoints_from_before_the_run_hide_no_progress(tmp_path: Path, out: Path, how: str) -> None:
    for step in {"higher": (5000,), "in place": (10, 20, 30, 40, 50), "many": range(5000, 5030)}[how]:
        save(out, step)
        for path in (out / f"checkpoint-{step}" / "state.json", out / f"checkpoint-{step}"):
            os.utime(path, (1e9, 1e9))

    def saves(step: int) -> None:
        (out / f"checkpoint-{step}").mkdir(exist_ok=True)
        (out / f"checkpoint-{step}" / "state.json").write_text(f'{{"step": {step}}}')

    for number, steps in ((1, (10, 20)), (2, (30, 40))):
        attempt = Attempt(tmp_path, number, restarts=99)
        for step in steps:
            assert attempt.fails(BUG, while_it_ran=lambda step=step: saves(step)).action is Action.RESTART
            past = attempt.program.past()
            assert past is not None
            assert (past.saved, attempt.progress.saved, attempt.progress.step) == (True, step, step)
        assert [data["step"] for data in attempt.told(EventKind.CHECKPOINT_SEEN) if data["new"]] == list(steps)
    assert attempt.program._command_progress is not None
    asyncio.run(attempt.program.start_generation(9))
    assert attempt.program._command_progress.began_from is not None
    assert attempt.program._command_progress.began_from.step == 40, "it has not gone on from a higher one"
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
    past = attempt.program.past()
    assert past is not None
    assert (past.saved, attempt.progress.saved) == (True, 120)


def test_the_same_step_torn_again_and_again_is_no_progress(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    attempt = Attempt(tmp_path, 1, restarts=99)
    saved = []
    for _ in range(3):
        attempt.fails(BUG, while_it_ran=lambda: save(out, 20, '{"tor'))
        past = attempt.program.past()
        assert past is not None
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


def test_of_a_workload_nothing_is_looked_at(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-1")
    run.make()
    run.attempt(1).make()
    events = EventLog(run.attempt(1).event_file("c"), "c", 1)
    assert CommandRun(run, run.attempt(1), JobConfig(), events, AttemptProgress(1, "1", lambda: 0.0)).past() is None
