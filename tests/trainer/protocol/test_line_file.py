"""Processes of one host append to one file: every line arrives whole, and once."""

import os
import subprocess
import sys
from pathlib import Path

from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.logs.line_file import LineFile, read_new_lines

WRITERS, LINES = 4, 400


def _write(path: Path, writer: int) -> None:
    log = EventLog(path, f"rank-{writer:05d}", 1)
    for number in range(LINES):
        log.write(EventKind.DRILL, kind="x" * (number * 37 % 9000), rank=writer, step=number)
    log.close()


def test_processes_that_append_at_once_lose_nothing_and_tear_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ranks-n.jsonl"
    writers = []
    for writer in range(WRITERS):
        program = f"from pathlib import Path; from {__name__} import _write; _write(Path({str(path)!r}), {writer})"
        writers.append(subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3]))
    seen, offset = [], 0
    while any(writer.poll() is None for writer in writers):  # as the controller does: on from where it stood
        events, offset = read_events(path, offset)
        seen += events
    seen += read_events(path, offset)[0]
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    for writer in range(WRITERS):
        told = [event for event in seen if event.source == f"rank-{writer:05d}"]
        assert [(event.seq, event.data["step"]) for event in told] == [(n + 1, n) for n in range(LINES)]
        assert all(len(event.data["kind"]) == event.data["step"] * 37 % 9000 for event in told)
    assert len(seen) == WRITERS * LINES


def test_a_line_that_one_process_tore_costs_the_next_process_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ranks-n.jsonl"
    one, other = LineFile(path), LineFile(path)
    one.append("first")
    os.write(one._descriptor, b"torn by a ki")
    other.append("second")
    one.append("third")
    assert read_new_lines(path, 0)[0] == [b"first", b"torn by a ki", b"second", b"third"]
    one.close()
    other.close()
