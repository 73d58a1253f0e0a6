"""What processes print reaches rotated files, and a file system that hangs stops nobody."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.agent.processes import log_pipes
from trainer.agent.processes.log_pipes import LogPipes, _unread
from trainer.protocol.logs.log_rotation import LogFile, LogsConfig, log_files, read_tail
from trainer.protocol.secrets.secret_redaction import LISTED

LIMITS = LogsConfig(max_mib=1.0, keep=2)


@pytest.fixture
def pipes():
    made = LogPipes(LIMITS)
    yield made
    made.close(10)


def printed(pipes: LogPipes, path: Path, program: str) -> None:
    output = pipes.descriptor(path)
    subprocess.run([sys.executable, "-c", program], stdout=output, stderr=output, check=True)
    assert pipes.settle(path, 60)


def test_a_process_that_prints_200_mb_leaves_no_more_than_the_limit(pipes: LogPipes, tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    printed(pipes, path, "for number in range(2000): print(str(number) * 25_000)\nprint('done')")
    sizes = [file.stat().st_size for file in log_files(path)]
    assert len(sizes) == 2
    assert max(sizes) <= 1 << 20
    assert read_tail(path, 100).endswith(b"1999\ndone\n")


def test_the_words_of_processes_follow_each_other_in_one_log(pipes: LogPipes, tmp_path: Path) -> None:
    for word in ("one", "two", "three"):
        printed(pipes, tmp_path / "log", f"print('{word}')")
    assert (tmp_path / "log").read_text() == "one\ntwo\nthree\n"


def test_logs_are_apart(pipes: LogPipes, tmp_path: Path) -> None:
    for word in ("one", "two"):
        printed(pipes, tmp_path / word, f"print('{word}')")
    assert [(tmp_path / word).read_text() for word in ("one", "two")] == ["one\n", "two\n"]


def test_who_prints_does_not_wait_for_a_file_system_that_hangs(tmp_path: Path, monkeypatch) -> None:
    back = threading.Event()
    write = LogFile.write
    monkeypatch.setattr(LogFile, "write", lambda file, data: (back.wait(60), write(file, data)))
    monkeypatch.setattr(log_pipes, "MOST_WAITING", 1 << 20)
    pipes, path = LogPipes(LIMITS, stall_seconds=1.0), tmp_path / "log"
    output = pipes.descriptor(path)
    # It ends although nothing is written, and although it prints more than is kept for later: 40 times what is read at
    # once, of which only the first has to wait.
    program = "for _ in range(600): print('x' * 19_999)"
    subprocess.run([sys.executable, "-c", program], stdout=output, check=True, timeout=20)
    assert not pipes.settle(path, 0.1)
    back.set()
    assert pipes.settle(path, 30)
    os.write(output, b"after\n")
    assert pipes.settle(path, 30)
    text = read_tail(path, 1 << 20)
    assert b" bytes are missing here: they could not be written]\n" in text
    assert text.endswith(b"after\n")
    pipes.close(1)


def test_a_full_disk_stops_nobody_and_the_gap_is_told(pipes: LogPipes, tmp_path: Path, monkeypatch) -> None:
    write, full = LogFile.write, [True]

    def refuse(file: LogFile, data: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(LogFile, "write", refuse)
    for word in ("lo", "st"):
        printed(pipes, tmp_path / "log", f"print('{word}', end='')")
    full[0] = False
    printed(pipes, tmp_path / "log", "print('kept')")
    told = "[orch: 4 bytes are missing here: they could not be written]"
    assert (tmp_path / "log").read_text() == f"\n{told}\nkept\n"


def test_a_gap_is_told_where_it_is(pipes: LogPipes, tmp_path: Path, monkeypatch) -> None:
    write, begun, go_on = LogFile.write, threading.Event(), threading.Event()

    def refuse_once(file: LogFile, data: bytes) -> None:
        monkeypatch.setattr(LogFile, "write", write)
        begun.set()
        go_on.wait(60)
        raise OSError(28, "No space left on device")

    output = pipes.descriptor(tmp_path / "log")
    assert pipes.settle(tmp_path / "log", 60)
    monkeypatch.setattr(LogFile, "write", refuse_once)
    os.write(output, b"lost\n")
    assert begun.wait(60)
    os.write(output, b"kept\n")  # read while the other is being written
    while log_pipes._unread(pipes._logs[tmp_path / "log"].ours):
        os.sched_yield()
    go_on.set()
    assert pipes.settle(tmp_path / "log", 60)
    told = "[orch: 5 bytes are missing here: they could not be written]"
    assert (tmp_path / "log").read_text() == f"\n{told}\nkept\n"


def test_a_program_that_makes_its_output_non_blocking_does_so_for_itself_only(pipes: LogPipes, tmp_path: Path) -> None:
    printed(pipes, tmp_path / "log", "import os; os.set_blocking(1, False)")
    assert os.get_blocking(pipes.descriptor(tmp_path / "log"))


def test_a_secret_is_not_logged_however_it_comes(pipes, tmp_path, monkeypatch):
    value = "canary-" + "0123456789" * 3
    monkeypatch.setenv("LOGGED_TOKEN", value)
    monkeypatch.setenv(LISTED, "LOGGED_TOKEN")
    path = tmp_path / "log"
    output = pipes.descriptor(path)
    for part in (f"a {value} b\n", value[:11], value[11:], " c\n"):
        os.write(output, part.encode())
        while _unread(output):  # so that the next part is read by itself
            os.sched_yield()
    # Blocks of what is read at once end in the middle of it.
    printed(pipes, path, f"for _ in range(20000): print({value!r}, end=' ')")
    os.write(output, value[:20].encode())
    assert pipes.settle(path, 60)
    text = read_tail(path, 1 << 20).decode()
    assert text.startswith("a ***LOGGED_TOKEN*** b\n***LOGGED_TOKEN*** c\n")
    assert text.count("***LOGGED_TOKEN***") == 20_002
    assert value not in text
    assert text.endswith(f" {value[:20]}"), "what is no secret after all is not kept back for ever"


def test_what_looks_like_the_beginning_of_a_secret_is_written_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("LAST_TOKEN", "canary-12345")
    monkeypatch.setenv(LISTED, "LAST_TOKEN")
    pipes = LogPipes(LIMITS)
    os.write(pipes.descriptor(tmp_path / "log"), b"done: can")
    pipes.close(60)
    assert (tmp_path / "log").read_text() == "done: can"
