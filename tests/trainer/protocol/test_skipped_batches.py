"""Left out batches: written by one attempt, obeyed by all later ones."""

import pytest

from trainer.protocol import skipped_batches
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "run-1")
    found.make()
    for number in (1, 2):
        found.attempt(number).make()
    return found


def bad(step: int, position: int) -> Skip:
    return Skip(step=step, position=position, reason=f"loss nan at {step}")


def test_a_run_without_any_leaves_nothing_out(run):
    assert skipped_batches.read_all(run) == ()


def test_what_one_attempt_adds_all_later_ones_read(run):
    skipped_batches.add(run.attempt(1), [bad(6, 40)])
    skipped_batches.add(run.attempt(1), [bad(9, 72)])
    skipped_batches.add(run.attempt(2), [bad(12, 96)])
    assert skipped_batches.read_all(run) == (bad(6, 40), bad(9, 72), bad(12, 96))
    assert skipped_batches.read(run.attempt(2)) == (bad(12, 96),)


def test_each_batch_stands_there_once(run):
    skipped_batches.add(run.attempt(1), [bad(6, 40), bad(6, 40)])
    skipped_batches.add(run.attempt(1), [bad(6, 40)])
    skipped_batches.add(run.attempt(2), [bad(7, 40)])
    assert skipped_batches.read_all(run) == (bad(6, 40),)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "orch.skipped/1"}', '{"skipped": [{"step": 1}]}'])
def test_a_damaged_file_is_never_taken_for_an_empty_one(run, text):
    run.attempt(1).skipped_batches.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011  # from the parser or from ours
        skipped_batches.read_all(run)
