"""Background line writer: lines stay in order, share writes, and never delay training."""

import threading
from pathlib import Path

import pytest

from trainer.protocol.logs.line_file import LineFile
from trainer.worker.reporting import metrics
from trainer.worker.reporting.metrics import LinesBehind

NEVER = 3600.0


class Hanging:
    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.written: list[str] = []
        self.closed = False

    def append(self, line: str) -> None:
        self.asked.set()
        self.answers.wait(60.0)
        self.written.append(line)

    def close(self) -> None:
        self.closed = True


def nothing_lost(why: str) -> None:
    raise AssertionError(why)


def test_a_file_that_hangs_holds_up_nobody_and_loses_nothing_that_has_room() -> None:
    file = Hanging()
    lines = LinesBehind(lambda: file, nothing_lost, batch_seconds=0.0)
    lines.append("1")
    assert file.asked.wait(60.0)
    for number in range(2, 2000):
        lines.append(str(number))
    assert not lines.flush(0.0)
    file.answers.set()
    lines.close(60.0)
    assert "\n".join(file.written).split() == [str(number) for number in range(1, 2000)]
    assert len(file.written) == 2, "what waited is one write"


def test_what_comes_shortly_after_a_write_waits_for_the_next_one_or_for_a_flush(tmp_path: Path) -> None:
    opened: list[LineFile] = []
    path = tmp_path / "steps.jsonl"

    def open_file() -> LineFile:
        opened.append(LineFile(path))
        return opened[-1]

    lines = LinesBehind(open_file, nothing_lost, batch_seconds=NEVER)
    lines.append("1")
    assert lines.flush(60.0)
    assert path.read_text() == "1\n"
    lines.append("2")
    lines.append("3")
    assert path.read_text() == "1\n"
    assert lines.flush(60.0)
    assert path.read_text() == "1\n2\n3\n"
    lines.append("4")
    lines.close(60.0)
    assert path.read_text() == "1\n2\n3\n4\n"
    assert len(opened) == 1


def test_the_first_line_is_written_without_waiting_for_others(tmp_path: Path) -> None:
    file = Hanging()
    file.answers.set()
    lines = LinesBehind(lambda: file, nothing_lost, batch_seconds=NEVER)
    lines.append("1")
    assert file.asked.wait(60.0)
    lines.close(60.0)


def test_a_disk_that_is_full_is_reported_and_later_lines_are_written(tmp_path: Path) -> None:
    told: list[str] = []
    full = [True]

    class Full(Hanging):
        def append(self, line: str) -> None:
            if full.pop() if full else False:
                raise OSError(28, "No space left on device")
            self.written.append(line)

    file = Full()
    lines = LinesBehind(lambda: file, told.append, batch_seconds=0.0)
    lines.append("1")
    assert lines.flush(60.0)
    lines.append("2")
    lines.close(60.0)
    assert told == ["[Errno 28] No space left on device"]
    assert file.written == ["2"]


def test_too_much_for_a_file_that_hangs_is_lost_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_CHARACTERS", 10)
    told: list[str] = []
    file = Hanging()
    lines = LinesBehind(lambda: file, told.append, batch_seconds=0.0)
    lines.append("1")
    assert file.asked.wait(60.0)
    for number in range(20):
        lines.append(str(number % 10))
    assert len(told) == 1
    assert "too many lines are queued" in told[0]
    file.answers.set()
    lines.close(60.0)
    assert "".join("".join(file.written).split()) == "10123456789"
