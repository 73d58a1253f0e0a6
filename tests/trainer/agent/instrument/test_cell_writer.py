"""The cell that a program writes is the one that the agent reads."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from trainer.agent.instrument import cell_writer
from trainer.protocol.rank_progress.program_record import ProgramFlags, ProgramRecord
from trainer.protocol.rank_progress.progress import Phase, ProgressCell, StopReason, Work


def test_writer_and_reader_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides write the same content, and the records of a program are read back."""
    ours, theirs = ProgressCell.create(), ProgressCell.create()
    writer = cell_writer.CellWriter(f"/proc/self/fd/{ours.descriptor}")
    _write_readings(monkeypatch, writer, lambda: writer.claim(os.getpid(), 5, 3))
    _write_readings(monkeypatch, theirs, lambda: theirs.update(generation=3, phase=Phase.INIT))
    work = slice(384, 424)
    assert ours.work() == Work(steps=7, sections=(8 * 30_000_000,) * 4)
    theirs._map[work] = ours._map[work]
    assert ours._map[:3072] == theirs._map[:3072]
    assert ours.read() == theirs.read()
    ours.ask_stop(StopReason.PREEMPTION, 12.5)
    assert writer.read_stop_request() == (3, 12.5)
    assert [cell_writer.PHASES[phase.name.lower()] for phase in Phase] == list(Phase)
    writer.add_framework("torch")
    writer.add_framework("lightning")
    writer.add_flags(ProgramFlags.ANSWERS)
    writer.disable("é" * 300)
    assert ours.program() == ProgramRecord(
        pid=os.getpid(), flags=ProgramFlags(7 | 16), rank=5, frameworks=("torch", "lightning"), error="é" * 255
    )


def _write_readings(monkeypatch: pytest.MonkeyPatch, cell: Any, begin: Callable[[], None]) -> None:
    ticks = iter(range(5_000_000_000, 6_000_000_000, 70_000_000))
    cpu = iter(range(0, 1_000_000_000, 30_000_000))
    monkeypatch.setattr("time.monotonic_ns", lambda: next(ticks))
    monkeypatch.setattr("time.thread_time_ns", lambda: next(cpu))
    begin()
    cell.update(step=7, restored_step=6, loss=1.5, saved_step=4, total_steps=90, step_seconds=0.25)
    if isinstance(cell, ProgressCell):
        cell._now.collective = 40
        cell.start_timing()
    else:
        cell.begin_timing(8)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.EVAL):
        cell.enter(phase)
    if isinstance(cell, ProgressCell):
        cell.tick()
    else:
        cell.tick(40)
