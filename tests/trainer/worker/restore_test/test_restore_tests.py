"""Restore tests on real ranks: healthy checkpoints pass on every layout, and each kind of damage is caught."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.folder_snapshot import snapshot
from tests.trainer.worker.restore_test.conftest import LAYOUTS, OLDER, STEPS, TESTED, Subject
from tests.trainer.worker.restore_test.damages import (
    DAMAGES,
    Damage,
    flipped_bit,
    missing_shard,
    nan_weights,
    remade_manifest,
)
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.restore_test import Outcome, RestoreVerdict
from trainer.protocol.user_code.code_record import CodeRecord

pytestmark = pytest.mark.multi


def damaged(tested: Subject, kind: Damage, seed: int, layout: str) -> RestoreVerdict:
    copy = tested.copy()
    kind(copy, tested.folder(OLDER), seed)
    kept = tested.manifest() if kind is remade_manifest else ""
    return tested.verdict(copy, layout, manifest=kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_checkpoint_is_restored_and_nothing_is_written_where_it_lies(tested: Subject, layout: str) -> None:
    before = snapshot(tested.source.dir.path)
    found = tested.verdict(tested.folder(), layout, manifest=tested.manifest())
    assert snapshot(tested.source.dir.path) == before
    assert found.outcome is Outcome.RESTORED, found
    evidence = found.evidence
    assert evidence["compared"] == 3
    assert evidence["fingerprints"]
    assert evidence["exact"] is (layout == "same")
    assert (evidence["largest_difference"] == 0.0) is (layout == "same")
    assert [step["step"] for step in evidence["steps"]] == [TESTED + 1, TESTED + 2, TESTED + 3]


def test_the_last_checkpoint_is_held_to_the_step_that_was_recorded_beyond_it(tested_alone: Subject) -> None:
    found = tested_alone.verdict(tested_alone.folder(STEPS))
    assert (found.outcome, found.evidence["compared"]) == (Outcome.RESTORED, 1), found
    assert found.evidence["run_steps"][str(STEPS + 1)] == [
        {key: tested_alone.source.final()["probe"][key] for key in ("loss", "grad_norm", "lr")}
    ]


def test_no_more_is_compared_than_the_run_has_trained(tested_alone: Subject) -> None:
    found = tested_alone.verdict(tested_alone.folder(9), steps=9)
    assert (found.outcome, found.evidence["compared"]) == (Outcome.RESTORED, 3), found


@pytest.mark.parametrize(
    "kind", [kind for kind in DAMAGES if kind is not missing_shard], ids=lambda kind: kind.__name__
)
def test_each_kind_of_damage_is_caught(tested: Subject, tested_alone: Subject, kind: Damage) -> None:
    of_ranks = kind is flipped_bit  # in the shard of the second rank
    found = damaged(tested if of_ranks else tested_alone, kind, seed=1, layout="same")
    assert found.outcome in (Outcome.CORRUPT, Outcome.SUSPECT), found


def test_a_loss_that_is_no_number_is_held_against_the_step_of_the_run(tested_alone: Subject) -> None:
    found = damaged(tested_alone, nan_weights, 0, "same")
    assert (found.outcome, "loss nan" in found.reason) == (Outcome.SUSPECT, True), found
    copy = tested_alone.copy(STEPS)
    nan_weights(copy, tested_alone.folder(OLDER), 0)
    unknown = tested_alone.verdict(copy, steps_digest="0" * 32)
    assert unknown.outcome is Outcome.NOT_COMPARABLE, unknown
    assert "its batch may be the cause" in unknown.reason


def test_a_damaged_one_is_named_by_file_and_tensor(tested: Subject) -> None:
    found = damaged(tested, missing_shard, 0, "same")
    assert found.outcome is Outcome.CORRUPT
    assert sorted(path.name for path in tested.folder().glob("*.distcp"))[0] in found.reason


@pytest.mark.parametrize("model", [{"layers": 2}, {"dim": 64}, {"tie_embeddings": True}])
def test_a_model_that_was_edited_since_is_no_verdict(tested_alone: Subject, model: dict[str, int]) -> None:
    found = tested_alone.verdict(tested_alone.folder(), over={"model": model})
    assert found.outcome is Outcome.NOT_COMPARABLE, found
    assert "the program builds a different model" in found.reason


def test_data_that_was_overwritten_is_no_verdict(tested_alone: Subject, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    shutil.copytree(json.loads(tested_alone.source.dir.config.read_text())["data"]["path"], tokens)
    over = {"data": {"path": str(tokens)}}
    for shard in tokens.glob("*.bin"):
        shard.write_bytes(bytes(shard.stat().st_size))
    found = tested_alone.verdict(tested_alone.folder(), over=over)
    assert found.outcome is Outcome.NOT_COMPARABLE, found
    assert "the data has changed since it was prepared" in found.reason
    assert "loss of step 7 is" in found.reason, "the difference is reported"


@pytest.mark.parametrize("differs", [("code.user",), ("env.torch",)])
def test_a_difference_beside_another_one_is_no_verdict(tested_alone: Subject, differs: tuple[str, ...]) -> None:
    found = tested_alone.verdict(tested_alone.folder(), over={"optimizer": {"lr": 3e-2}}, differs=differs)
    assert found.outcome is (Outcome.RESTORED if "code.user" in differs else Outcome.NOT_COMPARABLE), found
    assert differs[0] in found.reason


@pytest.mark.parametrize(
    ("mine", "rate", "outcome", "words"),
    [
        ({"timm": "1.0", "black": "2"}, 3e-2, Outcome.SUSPECT, "lr of step"),
        ({"timm": "2.0"}, 3e-2, Outcome.NOT_COMPARABLE, "with different software or code: package timm 1.0 -> 2.0"),
        ({"timm": "2.0"}, None, Outcome.RESTORED, "steps agree"),
    ],
)
def test_packages_are_compared_with_those_of_the_attempt_that_trained(
    tested_alone: Subject, mine: dict[str, str], rate: float | None, outcome: Outcome, words: str
) -> None:
    test = tested_alone.begin(tested_alone.folder(), over={"optimizer": {"lr": rate}} if rate else {})
    CodeRecord(packages=mine, imported=("timm",)).write(test.dir.attempt(1).code)
    trained = tested_alone.source.dir.attempt(1).code
    CodeRecord(packages={"timm": "1.0", "black": "1"}, imported=("timm",)).write(trained)
    try:
        assert test.train()["codes"] == [0] * test.world, test.log()
    finally:
        trained.unlink()
    found = RestoreVerdict.read(test.attempt)
    assert (found.outcome, words in found.reason) == (outcome, True), found


def test_what_is_not_there_is_no_verdict(tested_alone: Subject) -> None:
    copy = tested_alone.copy()
    test = tested_alone.begin(copy, place=str(copy.parent / "gone"))
    assert test.train()["codes"] == [ExitCode.ERROR]
    assert not test.attempt.restore_verdict.exists()
    assert "is missing: deleted, or not visible on this node" in test.log()


def test_a_test_that_is_stopped_has_no_verdict(tested: Subject) -> None:
    test = tested.begin(tested.folder(3), steps=9)
    answer = test.train(actions=[{"do": "ask", "rank": 1, "of_rank": 0, "at_step": 4, "reason": "PREEMPTION"}])
    assert answer["codes"] == [ExitCode.STOPPED_AFTER_SAVE] * 2, test.log()
    assert not test.attempt.restore_verdict.exists()
    assert not list(test.dir.checkpoints.iterdir())


@pytest.mark.proof
@pytest.mark.parametrize("kind", DAMAGES, ids=lambda kind: kind.__name__)
def test_ten_of_each_kind_are_caught(
    tested: Subject, tested_in_float32: Subject, kind: Damage, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(10):
        subject, layout = ((tested, "same"), (tested_in_float32, "1"))[seed // 5]
        found = damaged(subject, kind, seed, layout)
        assert found.outcome in (Outcome.CORRUPT, Outcome.SUSPECT), (seed, layout, found)
    record_property("damaged checkpoints caught by a restore test", 10)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_healthy_ones_are_restored(
    tested: Subject, part: int, record_property: Callable[[str, object], None]
) -> None:
    for number in range(20 * part, 20 * part + 20):
        step = (3, 6, 9, 12)[number % 4]
        layout = tuple(LAYOUTS)[number // 4 % len(LAYOUTS)]
        found = tested.verdict(tested.folder(step), layout, manifest=tested.manifest(step))
        assert found.outcome is Outcome.RESTORED, (number, step, layout, found)
    record_property("healthy checkpoints restored by a restore test", 20)
