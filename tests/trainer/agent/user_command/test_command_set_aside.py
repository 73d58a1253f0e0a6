"""Checkpoints of a user's program that are moved away and put back, over generations and attempts."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.user_command.command_attempt import BUG, TORN, Attempt, names, save, save_ranks
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.user_command.command_memory import CommandMemory
from trainer.protocol.events import EventKind
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd


def test_nothing_is_set_aside_while_something_of_the_generation_may_live(tmp_path: Path, out: Path) -> None:
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1)
    attempt.fails(cleared=False)
    attempt.fails(cleared=False)
    assert names(out) == ["checkpoint-10", "checkpoint-20"]


def test_one_checkpoint_after_another_is_not_set_aside_over_attempts(tmp_path: Path, out: Path) -> None:
    for step in (10, 20, 30, 40):
        save(out, step)
    for number in (1, 2):
        assert Attempt(tmp_path, number, restarts=0).fails().action is Action.END
    assert names(out) == [f"checkpoint-{step}" for step in (10, 20, 30)]
    last = Attempt(tmp_path, 3, restarts=0).fails()
    assert last.known_failure.kind is FailureKind.STORAGE
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
    assert last.known_failure.kind is FailureKind.STORAGE
    assert names(out) == [f"checkpoint-{step}" for step in (10, 20, 30, 40)], "it was not the checkpoint"


@pytest.mark.parametrize("renamed", [True, False])
def test_a_coordinator_that_dies_while_it_sets_one_aside(tmp_path, out, monkeypatch, renamed):
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
    past = second.past
    assert past.aside == (("checkpoint-20",) if renamed else ())


def test_nothing_is_renamed_that_could_not_be_written_down(tmp_path, out, monkeypatch):
    def refuses(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("trainer.agent.user_command.command_run.write_durably", refuses)
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    attempt.fails()
    assert names(out) == ["checkpoint-10", "checkpoint-20"]


def test_one_that_lacks_a_file_is_not_called_damaged(tmp_path: Path, out: Path) -> None:
    for step in (10, 20, 30):
        save(out, step)
    for step in (10, 20):
        (out / f"checkpoint-{step}" / "eval_results.json").write_text("{}")
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    attempt.fails()
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert "lacks eval_results.json" in aside["reason"]
    assert aside["damaged"] is False


def test_torn_ones_are_put_back_too_where_the_older_one_made_no_difference(tmp_path: Path, out: Path) -> None:
    for step, text in ((10, "{}"), (20, '{"to'), (30, '{"to')):
        save(out, step, text)
    attempt, last = Attempt(tmp_path, 1, restarts=9), None
    for _ in range(9):
        last = attempt.fails()
        if last.action is Action.END:
            break
    assert attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert last.known_failure.kind is FailureKind.STORAGE
    assert names(out) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_a_file_that_names_the_newest_one_follows_it_away_and_back(tmp_path: Path, out: Path) -> None:
    for step in (10, 20):
        save(out, step)
    (out / "latest").write_text("checkpoint-20")
    attempt = Attempt(tmp_path, 1)
    attempt.fails()
    assert attempt.fails().pause == 0.0
    assert (names(out), (out / "latest").read_text()) == (["checkpoint-10", "latest"], "checkpoint-10")
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert aside["reason"].endswith("; latest now names checkpoint-10")
    assert attempt.fails().action is Action.END  # alike: it was not the checkpoint
    assert (names(out), (out / "latest").read_text()) == (["checkpoint-10", "checkpoint-20", "latest"], "checkpoint-20")


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


def test_ranks_whose_names_have_time_stamps_all_go_on_from_the_older_one(tmp_path: Path, out: Path) -> None:
    older, newer = 1795713540430908070, 1795713545430908070
    save_ranks(out, older)
    save_ranks(out, newer, 1)
    (out / "latest").write_text(f"{newer}\n")
    attempt = Attempt(tmp_path, 1, pattern="step*-rank0.json")
    attempt.fails()
    attempt.fails()
    assert names(out) == ["latest", f"step{older}-rank0.json", f"step{older}-rank1.json"]
    assert (out / "latest").read_text() == f"{older}\n"


def test_a_step_that_a_rank_has_no_file_of_is_no_older_one(tmp_path: Path, out: Path) -> None:
    for step in (10, 20, 30):
        save_ranks(out, step, 0 if step == 30 else None)
    (out / "step20-rank1.json").unlink()
    attempt, before = Attempt(tmp_path, 1, pattern="step*-rank0.json"), names(out)
    last = [attempt.fails() for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    assert names(out) == before


def test_the_rest_of_one_that_was_moved_away_follows_with_the_next_coordinator(tmp_path, out, monkeypatch):
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
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    words = "orch moves no checkpoint, because checkpoints.path is the folder of one rank: "
    assert f"{words}{out / 'rank1'} is another" in last.reason
    assert names(out / "rank0") == names(out / "rank1") == ["checkpoint-10", "checkpoint-20"]


def test_nothing_is_moved_where_steps_begin_anew(tmp_path: Path, out: Path) -> None:
    saved = ("stage1_epoch_10", "stage1_epoch_20", "stage1_epoch_30", "stage2_epoch_10", "stage2_epoch_20")
    for at, name in enumerate(saved):
        (out / f"{name}.json").write_text('{"tor' if name == "stage2_epoch_20" else "{}")
        os.utime(out / f"{name}.json", ns=(at, at))
    attempt = Attempt(tmp_path, 1, pattern="stage*_epoch_*.json")
    last = [attempt.fails() for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    assert "moves no checkpoint, because steps start again: stage2_epoch_20.json was written after it" in last.reason
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
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.USER_ERROR)
    assert names(out) == ["checkpoint-10"]


def wants(path: Path | str, error: str = "[Errno 2] No such file or directory") -> RankEnd:
    return replace(BUG, exception="FileNotFoundError", message=f"{error}: '{path}'")


@pytest.mark.parametrize("named", ["checkpoint-20", "checkpoint-20/state.json"])
def test_a_program_that_asks_for_what_was_moved_away_has_a_pointer_elsewhere(tmp_path, out, named):
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1, restarts=9)
    attempt.fails()
    attempt.fails()
    last = [attempt.fails(wants(out / named)) for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.STORAGE)
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert last.reason.endswith(
        f"; it asks for checkpoint-20, which orch has moved to {aside['path']}, because it is damaged: state.json is "
        "not a complete JSON file. A file of the program names it: name checkpoint-10 there"
    )
    assert names(out) == ["checkpoint-10"]


@pytest.mark.parametrize("end", [wants("/o/checkpoint-200"), wants("/o/checkpoint-20", "[Errno 28] No space left")])
def test_other_errors_are_not_of_what_was_moved_away(tmp_path: Path, out: Path, end: RankEnd) -> None:
    save(out, 10)
    save(out, 20, '{"tor')
    attempt = Attempt(tmp_path, 1, restarts=9)
    attempt.fails()
    attempt.fails()
    assert "which orch has moved to" not in [attempt.fails(end) for _ in range(3)][-1].reason


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


@pytest.mark.parametrize("newest", ["sound", "bad too"])
def test_an_older_torn_one_is_moved_before_a_newest_without_a_sign_of_damage(tmp_path, out, newest):
    for step, text in ((80, "{}"), (90, '{"tor'), (100, "{}")):
        save(out, step, text)
    (out / "latest").write_text("checkpoint-90")
    attempt = Attempt(tmp_path, 1, restarts=9)
    assert attempt.fails().action is Action.RESTART
    reason = attempt.fails().reason
    assert "checkpoint-90, an older checkpoint, will be moved away before checkpoint-100 is blamed" in reason
    assert (names(out), (out / "latest").read_text()) == (
        ["checkpoint-100", "checkpoint-80", "latest"],
        "checkpoint-80",
    )
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert (aside["step"], aside["damaged"]) == (90, True)
    if newest == "sound":
        attempt.fails(BUG)  # another failure, once
        assert names(out) == ["checkpoint-100", "checkpoint-80", "latest"]
    else:
        unreadable = replace(TORN, exception="UnpicklingError", message="pickle data was truncated")
        attempt.fails(unreadable)
        assert "checkpoint-100" in names(out), "another error, once"
        assert "checkpoint-100, its newest checkpoint, will be moved away" in attempt.fails(unreadable).reason
        assert names(out) == ["checkpoint-80", "latest"]


def test_the_newest_one_is_moved_when_the_same_error_comes_back_without_the_torn_one(tmp_path: Path, out: Path) -> None:
    for step, text in ((80, "{}"), (90, '{"tor'), (100, "{}")):
        save(out, step, text)
    attempt, end = Attempt(tmp_path, 1, restarts=9), replace(TORN, exception="UnpicklingError", message="truncated")
    for left in (["100", "80", "90"], ["100", "80"], ["80"]):
        attempt.fails(end)
        assert names(out) == [f"checkpoint-{step}" for step in left]
    assert attempt.fails(end).action is Action.END, "no checkpoint made a difference"
    assert names(out) == ["checkpoint-100", "checkpoint-80", "checkpoint-90"], "so all are back"


def test_an_older_torn_one_is_put_back_where_the_error_stays_and_no_other_is_left(tmp_path: Path, out: Path) -> None:
    for step, text in ((90, '{"tor'), (100, "{}")):
        save(out, step, text)
    attempt, end = Attempt(tmp_path, 1, restarts=9), replace(TORN, exception="UnpicklingError", message="truncated")
    attempt.fails(end)
    attempt.fails(end)
    assert names(out) == ["checkpoint-100"]
    last = attempt.fails(end)
    assert last.action is Action.END
    assert "; its newest checkpoint is checkpoint-100, and checkpoint-90 was moved away earlier" in last.reason
    assert names(out) == ["checkpoint-100", "checkpoint-90"]


def test_checkpoints_since_the_last_finite_loss_are_not_loaded_again(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    asyncio.run(attempt.program.start_generation(1))
    for step in (10, 20, 30):
        save(out, step)
        os.utime(out / f"checkpoint-{step}" / "state.json", (1000.0 + step, 1000.0 + step))

    async def run(finite_until: float) -> str:
        await attempt.program.start_generation(1)
        lost = Failure(kind=FailureKind.NUMERIC, reason="the loss is nan", step=25)
        now = GenerationState(number=1, started=100.0, first_failure=105.0, finite_until=finite_until)
        decision = Decision(action=Action.RESTART, reason=lost.reason, failure=lost)
        await attempt.program.end_generation(decision, now, cleared=True)
        await attempt.program.start_generation(2)
        return attempt.program.resume

    assert asyncio.run(run(1025.0)) == str(out / "checkpoint-20")
    (moved,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert (moved["step"], moved["damaged"]) == (30, True)
    assert moved["reason"] == "it was saved after the last finite loss, so its weights may be unusable"
    # Its loss was never finite after the start from 20, so that one may be the cause; the last one stays.
    assert asyncio.run(run(0.0)) == str(out / "checkpoint-10")
    assert asyncio.run(run(0.0)) == str(out / "checkpoint-10")
