"""Comparison of a restore test's steps with those of its run, and what a difference proves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical, dump_line
from trainer.protocol.config import config_digest
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.worker.restore_test.comparison import (
    BOUNDS,
    Conditions,
    compare,
    other_packages,
    recorded_steps,
    why_no_verdict,
    why_not_compared,
)

TIGHT = BOUNDS["float32"]
STEP = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}


NAN, INFINITE = float("nan"), float("inf")
NEARLY = {**STEP, "loss": 2.0000000000000004}
FAR = {**STEP, "loss": 9.0}


@pytest.mark.parametrize(
    ("mine", "recorded", "dtype", "exact", "difference"),
    [
        (STEP, [STEP], "float32", True, ""),
        (NEARLY, [STEP], "float32", True, "loss of step 7 is 2.0000000000000004, the run had 2.0"),
        (NEARLY, [STEP], "float32", False, ""),
        (STEP, [FAR, STEP], "float32", True, ""),  # one repetition that agrees is enough
        (STEP, [FAR, FAR], "float32", True, "loss of step 7"),
        ({**STEP, "lr": 0.1 * (1 + 1e-9)}, [STEP], "bfloat16", False, "lr of step 7"),  # depends only on the step
        ({**STEP, "loss": NAN}, [STEP], "bfloat16", False, "loss of step 7 is nan"),
        ({**STEP, "loss": INFINITE}, [STEP], "bfloat16", False, "loss of step 7 is inf"),
        ({**STEP, "loss": 0.0}, [{**STEP, "loss": 1e-300}], "float32", False, ""),
    ],
)
def test_a_step_is_compared_bit_for_bit_or_within_bounds(
    mine: dict[str, float], recorded: list[dict[str, float]], dtype: str, exact: bool, difference: str
) -> None:
    found = compare({7: mine}, {7: recorded}, BOUNDS[dtype], exact=exact).difference
    assert found.startswith(difference)
    assert bool(found) == bool(difference)


def test_differences_may_grow_with_the_steps() -> None:
    def off(by: float) -> dict[str, float]:
        return {**STEP, "loss": STEP["loss"] * (1 + by)}

    mine, run = {7: STEP, 8: STEP, 9: off(2.5e-6)}, {step: [STEP] for step in (7, 8, 9)}
    found = compare(mine, run, TIGHT, exact=False)
    assert (found.difference, found.compared) == ("", 3)
    assert found.largest == pytest.approx(2.5e-6, rel=1e-3)
    assert compare({7: off(2.5e-6)}, run, TIGHT, exact=False).difference


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


def test_repetitions_and_the_final_probe_are_read_without_torn_lines_and_other_configs(run: RunDir) -> None:
    assert losses(run) == [1.0, 2.0]
    run.attempt(2).final.write_text(json.dumps({"probe": {"step": 7, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1}}))
    assert losses(run) == [1.0, 2.0, 3.0]
    run.attempt(2).config.write_bytes(canonical({"optimizer": {"lr": 0.2}}))
    assert losses(run) == [1.0]


@pytest.mark.parametrize(("saved_by", "generation", "other"), [(1, 1, [2]), (2, 1, []), (2, 2, [2]), (1, 2, [2])])
def test_steps_of_other_software_are_marked(run: RunDir, saved_by: int, generation: int, other: list[int]) -> None:
    log = EventLog(run.attempt(2).rank_events("n0"), "rank-00000", 2)
    log.generation = generation
    log.write(EventKind.CHECKPOINT_SOFTWARE, step=3, changes={"torch": ["2.12", "2.13"]})
    log.close()
    found = recorded_steps(run, [7], config_digest(run.config), saved_by)[7]
    assert [int(values["loss"]) for values in found if "other_software" in values] == other
    nearly = {**STEP, "loss": 2.0 * (1 + 1e-9)}
    assert bool(compare({7: nearly}, {7: found[1:]}, TIGHT, exact=True).difference) is not bool(other)


def test_steps_of_other_code_are_marked(run: RunDir, tmp_path: Path) -> None:
    codes = {number: CodeRecord(files={"mine": CodeFile(path="mine.py", sha256=str(number))}) for number in (1, 2)}
    for number, code in codes.items():
        code.write(run.attempt(number).code)
    for number, code in codes.items():
        found = recorded_steps(run, [7], config_digest(run.config), 1, code)[7]
        assert [int(values["loss"]) for values in found if "other_software" not in values] == [number]
    far = compare({7: {**STEP, "loss": 9.0}}, {7: found[:1]}, TIGHT, exact=True)
    assert (bool(far.difference), far.why_no_verdict) == (
        True, "the run trained that step with different software or code"
    )  # fmt: skip


def test_steps_of_other_packages_are_marked_and_listed(run: RunDir) -> None:
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


def test_attempts_after_one_with_another_config_are_left_out(run: RunDir) -> None:
    run.attempt(2).config.write_bytes(canonical({"optimizer": {"lr": 0.2}}))
    run.attempt(3).make()
    run.attempt(3).config.write_bytes(canonical({"optimizer": {"lr": 0.1}}))
    run.attempt(3).metrics.write_bytes(line(7, 3.0))
    assert losses(run, saved_by=1) == [1.0]


def test_only_recorded_steps_and_without_equal_bits_only_the_first_are_compared() -> None:
    mine, run = {step: STEP for step in range(1, 11)}, {step: [STEP] for step in range(1, 11)}
    assert compare(mine, run, TIGHT, exact=False).compared == 5
    assert compare(mine, run, TIGHT, exact=True).compared == 10
    assert compare({7: STEP, 8: STEP}, {7: [STEP], 8: []}, TIGHT, exact=True).compared == 1


EQUAL = Conditions(same_layout=True, repeats=True, built_in=True, promises_equality=False, has_agreed=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"differs": ("code.user", "env.torch")}, "code.user, env.torch differ"),
        ({"software": {"torch": ["2.12", "2.13"]}}, "different software: torch"),
        ({"software": {"text_hash": [None, "0a"]}}, "different software: text_hash"),
        ({"built_in": False}, "no fault was found in the checkpoint: the steps of this workload depend on something"),
        ({"built_in": False, "promises_equality": True}, "no fault was found in the checkpoint"),
        ({"built_in": False, "has_agreed": True}, "no fault was found in the checkpoint"),
        ({"built_in": False, "differs": ("env.torch",)}, "env.torch differ"),
        ({"built_in": False, "software": {"torch": ["2.12", "2.13"]}}, "different software: torch"),
        ({"same_layout": False, "dtype": "bfloat16"}, "no bound is known for bfloat16"),
        ({"same_layout": False, "experts": 4}, "no bound is known for models with experts"),
        ({"same_layout": False, "built_in": False}, "no bound is known for this model"),
        ({"repeats": False, "dtype": "float16"}, "no bound is known for float16"),
        ({"software": {"threads": [1, 2]}, "dtype": "bfloat16"}, "no bound is known"),
    ],
)
def test_another_cause_of_a_difference_prevents_a_verdict(changes: dict[str, Any], words: str) -> None:
    assert words in why_no_verdict(replace(EQUAL, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"same_layout": False},
        {"software": {"threads": [1, 2], "cpu": ["a", "b"]}},
        {"software": {"cpu_model": ["a", "b"], "kernel_settings": ["", "MKL_CBWR=AVX2"]}},
    ],
)
def test_the_measured_bound_applies_to_dense_float32(changes: dict[str, Any]) -> None:
    assert not replace(EQUAL, **changes).exact
    assert why_no_verdict(replace(EQUAL, **changes)) == ""


def test_bits_count_for_equal_conditions_and_for_workloads_that_have_kept_their_promise() -> None:
    assert EQUAL.exact
    assert why_not_compared(EQUAL) == why_no_verdict(EQUAL) == ""
    assert why_no_verdict(replace(EQUAL, built_in=False, promises_equality=True, has_agreed=True)) == ""


def test_edited_code_and_other_random_numbers_are_not_compared() -> None:
    assert "code.user" in why_not_compared(replace(EQUAL, differs=("code.user",)))
    assert "random numbers" in why_not_compared(replace(EQUAL, same_layout=False, drawn=True))
    assert why_not_compared(replace(EQUAL, drawn=True)) == ""
