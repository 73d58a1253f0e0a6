"""Table of programs and faults: what a program's output says, and how its cells are shown and continued."""

import pytest

from benchmarks import programs
from benchmarks.program_faults import CALM, FAULTS
from benchmarks.program_log import parse_log
from benchmarks.program_run import SCRIPTS

UNDISTURBED = {"state": "SUCCEEDED", "loss": "0.5", "weights": "ab", "starts": 1, "ranks": 2}
GOOD = {**UNDISTURBED, "noticed_s": 1.2, "back_s": 12.34, "steps_lost": 5, "named": True}


def steps(first: int, last: int) -> list[str]:
    return [f"step {step} loss 0.5" for step in range(first, last + 1)]


def test_steps_are_lost_if_they_are_trained_again() -> None:
    lines = ["start after step 0", *steps(1, 27), "--- generation 2 ---", "start after step 20", *steps(21, 30)]
    assert parse_log(lines).steps_lost == 7
    assert parse_log([*lines, "start after step 30", *steps(31, 40)]).steps_lost == 7
    assert parse_log([*lines, "start after step 0", *steps(1, 40)]).steps_lost == 37
    assert parse_log([*lines, "start after step 20", "start after step 20", *steps(21, 40)]).steps_lost == 17


def test_the_newest_step_and_the_result_are_found_among_other_lines() -> None:
    log = parse_log(["a warning", "start after step 0", *steps(1, 3), "Epoch 1", "final loss 0.25 weights 12ab"])
    assert (log.step, log.loss, log.weights) == (3, "0.25", "12ab")
    assert parse_log(["start after step 7"]).step == 0
    assert parse_log([]).starts == ()


def test_a_row_shows_figures_failures_and_cells_without_a_run() -> None:
    wrong = {**GOOD, "named": False, "weights": "cd"}
    cells = {CALM: UNDISTURBED, "kill": GOOD, "stop": wrong, "disk": {"problem": "x", "ranks": 2}}
    shown = programs.row("ddp", cells)
    assert shown.count("not run") == len(FAULTS) - 4
    assert "| 1 s / 12 s, 5 lost, named | 1 s / 12 s, 5 lost, not named | not run |" in shown
    assert shown.endswith("| FAILED | yes | 1 of 2 |")
    assert programs.row("ddp", {}).count("not run") == len(FAULTS) - 1 + 2


@pytest.mark.parametrize(
    ("cells", "again", "order"),
    [
        ({}, False, [CALM, "kill", "stop"]),
        ({CALM: UNDISTURBED}, False, ["kill", "stop"]),
        ({CALM: UNDISTURBED, "kill": GOOD, "stop": {"problem": "x"}}, False, ["stop"]),
        ({CALM: UNDISTURBED, "kill": {**GOOD, "named": False}, "stop": GOOD}, False, ["kill"]),
        ({CALM: UNDISTURBED, "kill": GOOD, "stop": GOOD}, True, ["kill", "stop"]),
    ],
)
def test_a_run_continues_with_the_cells_that_have_not_passed(
    cells: dict[str, programs.Cell], again: bool, order: list[str]
) -> None:
    assert programs.order_faults(["kill", "stop"], cells, again=again) == order


def test_the_record_names_no_folder_of_the_machine_that_measured() -> None:
    assert "(/" not in programs.RECORD.read_text()


def test_every_program_exists_and_knows_nothing_of_orch() -> None:
    for program in programs.PROGRAMS.values():
        text = (SCRIPTS / program.script).read_text()
        assert "orch" not in text.replace("torch", ""), program.script
