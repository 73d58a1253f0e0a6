"""The cell that a program writes is the one that the agent reads."""

import math
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
    monkeypatch.setattr("time.time", lambda: 99.5)
    writer = cell_writer.CellWriter(f"/proc/self/fd/{ours.descriptor}")
    _write_readings(monkeypatch, writer, lambda: writer.claim(os.getpid(), 5, 3))
    _write_readings(monkeypatch, theirs, lambda: theirs.update(generation=3, phase=Phase.INIT))
    work = slice(384, 424)
    assert ours.work() == Work(steps=0, sections=(8 * 30_000_000,) * 4), "the timed step has not ended"
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
        pid=os.getpid(),
        flags=ProgramFlags(7 | 16),
        rank=5,
        frameworks=("torch", "lightning"),
        error="é" * 255,
        finite_until=99.5,
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
        next(ticks)  # the writer reads the clock there
    else:
        cell.begin_timing(8)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.EVAL):
        cell.enter(phase)
    if isinstance(cell, ProgressCell):
        cell.tick()
    else:
        cell.tick(40)


def test_a_program_without_groups_keeps_the_count_of_its_collectives() -> None:
    cell = ProgressCell.create()
    writer = cell_writer.CellWriter(f"/proc/self/fd/{cell.descriptor}")
    writer.claim(os.getpid(), 0, 1)
    writer.tick(5)
    writer.tick(0)
    reading = cell.read()
    assert reading is not None
    assert reading.collective == 5


def test_unusable_losses_in_a_row_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, now = ProgressCell.create(), [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    writer = cell_writer.CellWriter(f"/proc/self/fd/{cell.descriptor}")
    writer.claim(os.getpid(), 0, 1)

    def losses() -> tuple[int, int, float]:
        record = cell.program()
        assert record is not None
        return record.unusable_losses, record.unusable_since, record.finite_until

    assert losses() == (0, 0, 0.0)
    for step, loss in enumerate((2.5, math.nan, 2.0, math.inf, math.nan, -math.inf), 1):
        now[0] += 1
        writer.update(step=step, loss=loss)
    assert losses() == (3, 4, 103.0)
    writer.update(loss=1.0)
    assert losses() == (0, 4, 106.0)
    writer.claim(os.getpid(), 0, 1)
    assert losses() == (0, 0, 0.0), "another process trains now"


class Clocks:
    """Time that passes only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 0
        monkeypatch.setattr("time.monotonic_ns", lambda: self.wall)
        monkeypatch.setattr("time.thread_time_ns", lambda: self.cpu)

    def spend(self, wall: int, cpu: int = 0) -> None:
        self.wall, self.cpu = self.wall + wall, self.cpu + cpu


def test_time_without_a_collective_is_own_work_and_else_only_cpu_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, clocks, collectives = ProgressCell.create(), Clocks(monkeypatch), [10]
    writer = cell_writer.CellWriter(f"/proc/self/fd/{cell.descriptor}")
    writer.claim(os.getpid(), 0, 1)
    writer.count_collectives = lambda: collectives[0]
    before = writer.record_step(8, 0)
    writer.begin_timing(8)
    clocks.spend(50)  # it sleeps in its forward pass
    writer.enter(Phase.BACKWARD)
    collectives[0] += 1
    clocks.spend(900, cpu=7)  # it waits for its peers
    writer.enter(Phase.OPTIMIZER)
    clocks.spend(3, cpu=3)
    writer.record_step(9, before)
    assert cell.work() == Work(steps=9, sections=(0, 8 * 50, 8 * 7, 8 * 3))


def test_steps_without_times_do_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a window would hold one timed step or none, depending on when the agent reads."""
    cell, clocks = ProgressCell.create(), Clocks(monkeypatch)
    writer = cell_writer.CellWriter(f"/proc/self/fd/{cell.descriptor}")
    writer.claim(os.getpid(), 0, 1)
    seen, at = [], 0
    for number in range(1, 34):
        clocks.spend(5, cpu=5)
        at = writer.record_step(number, at)
        writer.begin_timing(number)
        seen.append((cell.work().steps, cell.work().sections[1]))
    assert sorted(set(seen)) == [(0, 0), (9, 40), (17, 80), (25, 120), (33, 160)]
