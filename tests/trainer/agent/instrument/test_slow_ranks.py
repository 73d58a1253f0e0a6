"""Slow ranks of an unmodified data-parallel program are named, from the work that its cells show."""

import time
from pathlib import Path

import pytest

from tests.trainer.agent.instrument.instrumented import Instrumented, instrumented
from trainer.agent.watch.stragglers import StragglerVerdict, WorkWindows, should_report_work
from trainer.protocol.config_sections.fault_detection_config import StragglerConfig

PROGRAM = str(Path(__file__).with_name("slow_program.py"))
BEGIN, STEPS = 500, 850


def judge(program: Instrumented, kind: str) -> list[StragglerVerdict]:
    """Run two ranks to their end, and read their cells as an agent does."""
    words = [PROGRAM, kind, "1", str(BEGIN), str(STEPS)]
    ranks = [program.start(words, rank, 2, {}) for rank in range(2)]
    windows = WorkWindows(2, lambda rank: (rank,), ["n0", "n1"], StragglerConfig())
    verdicts, reported = [], [0, 0]
    while any(process.poll() is None for process in ranks):
        rows = []
        for rank, cell in enumerate(program.cells):
            work = cell.work()
            if should_report_work(reported[rank], work.steps):
                reported[rank] = work.steps
                rows.append((rank, work.steps, *work.sections))
        verdicts += windows.add_report(rows)
        time.sleep(0.1)
    outputs = [process.communicate() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert min(reported) > STEPS - 16, "no step was counted"
    return verdicts


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["burn", "sleep"])
def test_a_rank_that_becomes_slow_in_its_forward_pass_is_named(tmp_path: Path, kind: str) -> None:
    with instrumented(tmp_path) as program:
        verdicts = judge(program, kind)
    assert {(verdict.rank, verdict.section) for verdict in verdicts} == {(1, "forward")}, verdicts
    assert verdicts[0].step >= BEGIN - 16


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["uneven", "evaluation"])
def test_no_rank_of_a_healthy_program_is_named(tmp_path: Path, kind: str) -> None:
    with instrumented(tmp_path) as program:
        assert judge(program, kind) == []
