"""A restore test's steps are held to what the run has recorded: which of it, and how closely."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical, dump_line
from trainer.protocol.config import config_digest
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.worker.restore_test.recorded_steps import BOUNDS, compare, other_packages, recorded_steps

TIGHT = BOUNDS["float32"]
STEP = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}


def test_equal_bits_agree_and_others_do_not() -> None:
    nearly = {**STEP, "loss": 2.0000000000000004}
    assert compare({7: STEP}, {7: [STEP]}, TIGHT, exact=True).difference == ""
    found = compare({7: nearly}, {7: [STEP]}, TIGHT, exact=True)
    assert found.difference == "loss of step 7 is 2.0000000000000004, the run had 2.0"
    assert compare({7: nearly}, {7: [STEP]}, TIGHT, exact=False).difference == ""


def test_one_repetition_that_agrees_is_enough() -> None:
    other = {**STEP, "loss": 9.0}
    assert compare({7: STEP}, {7: [other, STEP]}, TIGHT, exact=True).difference == ""
    assert compare({7: STEP}, {7: [other, other]}, TIGHT, exact=True).difference


def test_differences_may_grow_with_the_steps() -> None:
    def off(by: float) -> dict[str, float]:
        return {**STEP, "loss": STEP["loss"] * (1 + by)}

    mine, run = {7: STEP, 8: STEP, 9: off(2.5e-6)}, {step: [STEP] for step in (7, 8, 9)}
    found = compare(mine, run, TIGHT, exact=False)
    assert (found.difference, found.compared) == ("", 3)
    assert found.largest == pytest.approx(2.5e-6, rel=1e-3)
    assert compare({7: off(2.5e-6)}, run, TIGHT, exact=False).difference


def test_the_learning_rate_is_equal_or_wrong() -> None:
    wrong = {**STEP, "lr": 0.1 * (1 + 1e-9)}
    assert "lr of step 7" in compare({7: wrong}, {7: [STEP]}, BOUNDS["bfloat16"], exact=False).difference


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_agrees_with_nothing(bad: float) -> None:
    assert compare({7: {**STEP, "loss": bad}}, {7: [STEP]}, BOUNDS["bfloat16"], exact=False).difference


def test_a_step_that_the_run_has_not_trained_is_not_compared() -> None:
    assert compare({7: STEP, 8: STEP}, {7: [STEP], 8: []}, TIGHT, exact=True).compared == 1


def line(step: int, loss: float, **more: Any) -> bytes:
    return (dump_line({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, **more}) + "\n").encode()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "r-1")
    made.make()
    made.config.write_bytes(canonical({"optimizer": {"lr": 0.1}}))
    for number in (1, 2):
        made.attempt(number).make()
        made.attempt(number).metrics.write_bytes(line(7, float(number)) + line(70, 5.0) + b'{"step":7,"lo')
    return made


def losses(run: RunDir, **more: Any) -> list[float]:
    return [values["loss"] for values in recorded_steps(run, [7], config_digest(run.config), **more)[7]]


def test_every_repetition_is_read_and_a_torn_line_left_out(run: RunDir) -> None:
    assert losses(run) == [1.0, 2.0]


def test_an_attempt_with_another_config_says_nothing(run: RunDir) -> None:
    run.attempt(2).config.write_bytes(canonical({"optimizer": {"lr": 0.2}}))
    assert losses(run) == [1.0]


def test_the_probe_of_a_finished_run_counts_as_a_step(run: RunDir) -> None:
    run.attempt(2).final.write_text(json.dumps({"probe": {"step": 7, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1}}))
    assert losses(run) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("saved_by", "generation", "other"), [(1, 1, [2]), (2, 1, []), (2, 2, [2]), (1, 2, [2])])
def test_steps_of_other_software_are_marked(run: RunDir, saved_by: int, generation: int, other: list[int]) -> None:
    """What attempt 2 began with is nothing that it changed after it had saved."""
    log = EventLog(run.attempt(2).rank_events("n0"), "rank-00000", 2)
    log.generation = generation
    log.write(EventKind.CHECKPOINT_SOFTWARE, step=3, changes={"torch": ["2.12", "2.13"]})
    log.close()
    found = recorded_steps(run, [7], config_digest(run.config), saved_by)[7]
    assert [int(values["loss"]) for values in found if "other_software" in values] == other
    nearly = {**STEP, "loss": 2.0 * (1 + 1e-9)}
    assert bool(compare({7: nearly}, {7: found[1:]}, TIGHT, exact=True).difference) is not bool(other)


def test_steps_of_other_code_are_marked(run: RunDir, tmp_path: Path) -> None:
    """Attempt 2 was resumed with edited code: its steps prove nothing about a test with the code of attempt 1."""
    codes = {number: CodeRecord(files={"mine": CodeFile(path="mine.py", sha256=str(number))}) for number in (1, 2)}
    for number, code in codes.items():
        code.write(run.attempt(number).code)
    for number, code in codes.items():
        found = recorded_steps(run, [7], config_digest(run.config), 1, code)[7]
        assert [int(values["loss"]) for values in found if "other_software" not in values] == [number]
    far = compare({7: {**STEP, "loss": 9.0}}, {7: found[:1]}, TIGHT, exact=True)
    assert (bool(far.difference), far.why_no_verdict) == (
        True, "the run had trained that step with other software or code"
    )  # fmt: skip


def test_steps_of_other_packages_are_marked_and_the_packages_named(run: RunDir) -> None:
    """Packages that are not known are not taken to be the same, where the test knows its own."""
    for number in (1, 2):
        CodeRecord(packages={"timm": f"{number}.0", "black": "1"}, imported=("timm",)).write(run.attempt(number).code)
    mine = CodeRecord(packages={"timm": "1.0", "black": "2"}, imported=("timm",))
    found = recorded_steps(run, [7], config_digest(run.config), 1, mine)[7]
    assert [int(values["loss"]) for values in found if "other_software" in values] == [2]
    assert other_packages(run, 1, mine) == []
    assert other_packages(run, 2, mine) == ["package timm 2.0 -> 1.0"]
    assert other_packages(run, 0, mine) == ["package timm 2.0 -> 1.0"], "compared with the newest attempt"
    CodeRecord().write(run.attempt(1).code)
    assert other_packages(run, 1, mine) == ["the packages of attempt 1 are not known"]
    found = recorded_steps(run, [7], config_digest(run.config), 1, mine)[7]
    assert [int(values["loss"]) for values in found if "other_software" in values] == [1, 2]
    found = recorded_steps(run, [7], config_digest(run.config), 1, CodeRecord())[7]
    assert not any("other_software" in values for values in found)


def test_what_goes_on_from_another_config_says_nothing_either(run: RunDir) -> None:
    """The learning rate was changed and changed back: attempt 3 has the config of attempt 1, and other weights."""
    run.attempt(2).config.write_bytes(canonical({"optimizer": {"lr": 0.2}}))
    run.attempt(3).make()
    run.attempt(3).config.write_bytes(canonical({"optimizer": {"lr": 0.1}}))
    run.attempt(3).metrics.write_bytes(line(7, 3.0))
    assert losses(run, saved_by=1) == [1.0]


def test_only_the_first_steps_are_compared_where_bits_may_differ() -> None:
    mine, run = {step: STEP for step in range(1, 11)}, {step: [STEP] for step in range(1, 11)}
    assert compare(mine, run, TIGHT, exact=False).compared == 5
    assert compare(mine, run, TIGHT, exact=True).compared == 10


def test_next_to_nothing_is_nothing() -> None:
    assert compare({7: {**STEP, "loss": 0.0}}, {7: [{**STEP, "loss": 1e-300}]}, TIGHT, exact=False).difference == ""
