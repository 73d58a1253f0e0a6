"""The program's standard streams as shells leave them: closed, full, unread, with few signs."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.orchestrator.cli.conftest import Patch, Seeds
from tests.orchestrator.cli.forked_orch import ForkedOrch

ROOT = Path(__file__).resolve().parents[3]
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(seeds: Seeds) -> Program:
    run = seeds.run()

    def typed(words: str, shell: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        line = f"{sys.executable} -P -m orchestrator.cli.main {words.replace('RUN', run)} {shell}"
        environ = {**os.environ, **more}
        return subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, check=False)

    return typed


# `show` opens the whole registry and takes longer: everything is closed to it at once.
CLOSED = [
    ("status", ">&-"),
    ("status", "2>&-"),
    ("--help", ">&- 2>&-"),
    ("--help", "<&-"),
    ("show RUN", "<&- >&- 2>&-"),
]


@pytest.mark.parametrize(("words", "shell"), CLOSED)
def test_a_closed_stream_is_no_trouble(program: Program, home: Path, words: str, shell: str) -> None:
    done = program(words, shell)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert not (home / "last-error.txt").exists()


def test_a_reader_that_goes_away_is_told_nothing(program: Program, home: Path) -> None:
    done = program("status", "2>&1 | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")
    assert not (home / "last-error.txt").exists()


@pytest.mark.parametrize("words", ["status", "status --json", "--help"])
def test_lost_answer_is_an_error(program: Program, words: str) -> None:
    done = program(words, "> /dev/full")
    assert done.returncode == 4
    assert "error: the answer cannot be written: No space left on device\n  stdout" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_unbuffered_output_keeps_its_order(program: Program) -> None:
    done = program("status", "2>&1", PYTHONUNBUFFERED="1")
    assert done.stdout.startswith("RUN\t"), done.stdout
    assert done.stdout.index("1 run ") > done.stdout.index("tiny-1")


def test_what_stderr_loses_changes_no_exit_code(program: Program) -> None:
    assert program("status nobody", "2> /dev/full").returncode == 3


def test_characters_missing_in_the_encoding(program: Program) -> None:
    done = program("status", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "1 run - controller" in done.stderr


@pytest.mark.parametrize("width", [60, 150, 200])
def test_a_page_is_as_wide_as_the_terminal(seeds: Seeds, monkeypatch: Patch, width: int) -> None:
    seeds.run(reason="a long reason " * 20)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, width))
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["--no-color", "status"]
    with ForkedOrch(seeds.store, words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while piece := os.read(ours, 65536):
                printed += piece
    os.close(ours)
    assert process.returncode == 0, printed
    lines = [line for line in printed.decode().splitlines() if " " in line]  # the registry's path is kept whole
    longest = max(map(len, lines))
    assert width - 20 < longest <= width


def test_umask_never_masks_owner(program: Program, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    before = os.umask(0o777)
    try:
        done = program(f"db backup {copy}")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert copy.stat().st_mode & 0o777 == 0o600


def test_names_in_a_locale_without_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "d\xe4\U0001f680"
    folder.mkdir()
    (folder / "\xe9.yaml").write_text(
        'includes: [tiny-gpt]\ncluster: {root: runs}\nenv: {MOOD: "\U0001f680"}\n', encoding="utf-8"
    )
    poor = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": os.defpath, "HOME": str(tmp_path)}
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from orchestrator.cli.entry import main; main()"
    words = [sys.executable, "-P", "-c", program, "--json", "config", "show", f"{folder}/\xe9.yaml"]
    done = subprocess.run(words, capture_output=True, env=poor, check=True)
    data = json.loads(done.stdout)["data"]["config"]
    assert (data["cluster"]["root"], data["env"]) == (f"{folder}/runs", {"MOOD": "\U0001f680"})
