"""Comparison of retrained steps with their earlier records."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.worker.reporting import retrained_steps
from trainer.worker.reporting.retrained_steps import RetrainedSteps, has_new_code, read_retrained


def line(step: int, loss: object = 1.5, **over: Any) -> dict[str, Any]:
    values = {"attempt": 1, "world": 2, "software": "0a", "position": 8 * step}
    return {**values, "step": step, "loss": loss, "grad_norm": 0.25, "lr": 0.1, **over}


def reported(recorded: dict[int, list[dict[str, Any]]], *steps: dict[str, Any], explained: bool = False) -> list[str]:
    found = list[str]()
    compared = RetrainedSteps(recorded, 2, lambda attempt: explained, lambda step, reason: found.append(reason))
    for values in steps:
        compared.step_ended(values["step"], {name: values[name] for name in values if name not in ("attempt", "world")})
    return found


def test_the_first_step_that_differs_is_reported_once() -> None:
    recorded = {step: [line(step)] for step in (4, 5, 6)}
    assert reported(recorded, line(4), line(5, 1.25), line(6, 9.0)) == ["loss of step 5 is 1.25, it was 1.5"]
    assert reported(recorded, line(4, grad_norm=0.5)) == ["grad_norm of step 4 is 0.5, it was 0.25"]
    assert reported(recorded, line(4), line(5), line(6), line(7, 9.0)) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_equal_to_themselves(loss: float) -> None:
    assert reported({4: [line(4, str(loss))]}, line(4, loss)) == []


def test_one_time_that_agrees_is_enough() -> None:
    assert reported({4: [line(4, 9.0), line(4)]}, line(4)) == []


@pytest.mark.parametrize(
    "other", [{"world": 4}, {"position": 40}, {"world": None}, {"software": "0b"}, {"software": None}]
)
def test_other_ranks_data_or_software_are_not_compared_nor_what_follows(other: dict[str, Any]) -> None:
    recorded = {4: [line(4, 9.0, **other)], 5: [line(5, 9.0, **other)]}
    assert reported(recorded, line(4), line(5)) == []


def test_a_step_whose_line_was_lost_is_passed_over() -> None:
    assert reported({4: [line(4)], 6: [line(6)]}, line(4), line(5), line(6, 9.0)) == [
        "loss of step 6 is 9.0, it was 1.5"
    ]


def test_a_change_of_code_explains_the_difference() -> None:
    assert reported({4: [line(4, 9.0)]}, line(4), explained=True) == []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.make()
    run.config.write_text("{}")
    for number in (1, 2):
        attempt = run.attempt(number)
        attempt.make()
        for file in (attempt.metrics, attempt.rank_events("n")):
            file.parent.mkdir(parents=True, exist_ok=True)
    return run


def record(run: RunDir, number: int, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(each) + "\n" for each in lines)
    run.attempt(number).metrics.write_text(text + '{"step":99,"lo')


def test_each_step_is_read_of_the_newest_attempt_that_has_trained_it(run: RunDir) -> None:
    assert read_retrained(run, 2, 3) == {}
    record(run, 1, *map(line, range(1, 7)))
    assert list(read_retrained(run, 2, 4)) == [5, 6]
    record(run, 2, line(5, 2.0, attempt=2))
    assert read_retrained(run, 2, 4) == {5: [line(5, 2.0, attempt=2)], 6: [line(6)]}
    assert list(read_retrained(run, 2, 5)) == [6]
    assert read_retrained(run, 2, 6) == {}


def test_only_the_end_of_a_long_file_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    record(run, 1, *map(line, range(1, 1000)))
    monkeypatch.setattr(retrained_steps, "TAIL_BYTES", 1000)
    found = read_retrained(run, 1, 0)
    assert 1 < len(found) < 20
    assert max(found) == 999


@pytest.mark.parametrize(
    ("config", "steps"),
    [({"optimizer": {"lr": 1.0}}, []), ({"checkpoint": {"keep": 8}, "logs": {"every": "5s"}}, [5, 6])],
)
def test_attempts_with_other_numeric_settings_are_not_compared(
    run: RunDir, config: dict[str, Any], steps: list[int]
) -> None:
    record(run, 1, *map(line, range(1, 7)))
    run.attempt(2).config.write_text(json.dumps(config))
    assert list(read_retrained(run, 2, 4)) == steps


def test_other_code_explains_and_the_same_attempt_has_the_same(run: RunDir) -> None:
    for number, digest in ((1, "a"), (2, "b")):
        record = CodeRecord(files={"model": CodeFile(path="/x/model.py", sha256=digest)})
        run.attempt(number).code.write_text(json.dumps(record.to_json()))
    assert has_new_code(run, 1, 2)
    assert not has_new_code(run, 2, 2)


@pytest.mark.parametrize("damage", ["no config", "empty config", "other config", "steps that are a folder"])
def test_an_old_attempt_that_cannot_be_read_ends_the_comparison_and_not_the_training(
    run: RunDir, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(run, 2, line(5, attempt=2), line("six"))  # type: ignore[arg-type]
    record(run, 1, line(6))
    run.attempt(2).config.write_text("{}")
    first = run.attempt(1)
    if damage == "no config":
        run.config.unlink()
    elif damage == "steps that are a folder":
        first.metrics.unlink()
        first.metrics.mkdir()
    else:
        first.config.write_text("" if damage == "empty config" else "[]")
    assert list(read_retrained(run, 2, 4)) == [5]
    assert "steps of attempt 1 and older ones are not compared" in capsys.readouterr().err
