"""Checkpoints of `orch.checkpointer` count as the program's progress."""

from pathlib import Path

from checkpointing.format.commit import checkpoint_name
from checkpointing.format.manifest import COMMIT
from tests.trainer.agent.user_command.command_attempt import BUG, Attempt
from trainer.protocol.failures.decision import Action
from trainer.protocol.failures.outcome import FailureKind


def commit(attempt: Attempt, step: int, *, whole: bool = True) -> None:
    folder = attempt.dir.run.checkpoints / checkpoint_name(step, attempt.dir.number, "0badcafe")
    folder.mkdir()
    if whole:
        (folder / COMMIT).write_text("{}")


def test_a_program_that_fails_alike_after_each_save_is_not_at_fault(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1, restarts=99, path="")
    for step in range(10, 60, 10):
        decision = attempt.fails(BUG, while_it_ran=lambda step=step: commit(attempt, step))
        assert decision.action is Action.RESTART
        assert "after it had saved a checkpoint of its own" in decision.reason
    assert attempt.past.saved
    # Without a new save, it fails for good.
    last = [attempt.fails(BUG) for _ in range(3)][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.USER_ERROR)


def test_a_save_without_its_commit_is_no_progress(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1, restarts=99, path="")
    last = [
        attempt.fails(BUG, while_it_ran=lambda step=step: commit(attempt, step, whole=False)) for step in (10, 20, 30)
    ][-1]
    assert (last.action, last.known_failure.kind) == (Action.END, FailureKind.USER_ERROR)


def test_the_checkpoints_of_earlier_attempts_are_where_it_starts_from(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1, path="")
    first.fails(BUG, while_it_ran=lambda: commit(first, 10))
    second = Attempt(tmp_path, 2, path="", restarts=99)
    last = [second.fails(BUG) for _ in range(3)][-1]
    assert last.known_failure.kind is FailureKind.USER_ERROR
