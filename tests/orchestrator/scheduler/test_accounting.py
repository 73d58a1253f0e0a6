"""Accounting that answers slowly, late or not at all."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.scheduler.interface import UNRECORDED, JobStatus
from orchestrator.scheduler.slurm.accounting import ASK_AGAIN, Accounting
from tests.orchestrator.scheduler.conftest import Program, printing
from tests.orchestrator.scheduler.test_slurm_text import accounting

PATIENCE = 60.0


def until(question: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not question():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe; a program that reads from it answers once a line is written."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def slow(gate: Path, rows: str) -> str:
    answer = printing(gate.parent, "rows", rows)
    return f"echo asked >> {gate.parent}/asked; read line < {gate}; {answer}"


def asked(gate: Path) -> int:
    path = gate.parent / "asked"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_slow_answer_is_returned_by_a_later_call(program: Program, gate: Path) -> None:
    program("sacct", slow(gate, accounting(JobIDRaw="7", State="TIMEOUT")))
    records = Accounting(patience=0.0)
    assert {job_id: job.state for job_id, job in records.find_ended({"7"}).items()} == {"7": UNRECORDED}
    until(lambda: asked(gate) == 1)
    both = records.find_ended({"7", "8"})
    assert {job.state for job in both.values()} == {UNRECORDED}
    assert both["7"].reason == "sacct has not answered yet"
    gate.write_text("\n")
    until(lambda: records.find_ended({"7", "8"})["7"].state == "TIMEOUT")
    assert asked(gate) == 1, "one query at a time"


def test_an_id_that_was_not_in_the_query_is_asked_for_next(program: Program, gate: Path) -> None:
    program("sacct", slow(gate, accounting(JobIDRaw="7", State="TIMEOUT")))
    records = Accounting(patience=0.0)
    records.find_ended({"7", "9"})
    gate.write_text("\n")
    answers: list[dict[str, JobStatus]] = []

    def answered() -> bool:
        answers.append(records.find_ended({"7", "8", "9"}))
        return answers[-1]["7"].state == "TIMEOUT"

    until(answered)
    found = answers[-1]
    assert found["8"].state == UNRECORDED
    assert "9" not in found, "accounting has no record of it"
    records.find_ended({"8"})
    until(lambda: asked(gate) == 2)
    gate.write_text("\n")


def test_slow_accounting_is_left_alone_for_a_multiple_of_the_time_it_took(program: Program, gate: Path) -> None:
    clock = [0.0]
    program("sacct", slow(gate, accounting(JobIDRaw="7", State="TIMEOUT")))
    records = Accounting(patience=0.0, mono=lambda: clock[0])
    records.find_ended({"7"})
    until(lambda: asked(gate) == 1)
    clock[0] = 60.0
    gate.write_text("\n")
    until(lambda: records.find_ended({"7"})["7"].state == "TIMEOUT")
    clock[0] = 179.0
    assert records.find_ended({"8"})["8"].reason == "sacct was slow and will be queried again later"
    clock[0] = 181.0
    records.find_ended({"8"})
    until(lambda: asked(gate) == 2)
    gate.write_text("\n")


def test_a_failure_is_followed_by_a_pause(program: Program, tmp_path: Path) -> None:
    clock = [0.0]
    program("sacct", f"echo asked >> {tmp_path}/asked; echo 'sacct: error: slurmdbd: gone' >&2")
    records = Accounting(mono=lambda: clock[0])
    for _ in range(3):
        assert "slurmdbd: gone" in records.find_ended({"7"})["7"].reason
    assert asked(tmp_path / "gate") == 1
    clock[0] = ASK_AGAIN
    records.find_ended({"7"})
    assert asked(tmp_path / "gate") == 2
